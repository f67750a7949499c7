"""Brackets exposed communication: the stretches in which the thread, or the stream that computes, may wait for it.

[Note: Exposed communication]
FSDP2 all-gathers in `unshard`, waits in `wait_for_unshard`, reduces in `post_backward` and waits for the last
reductions in a callback at the end of the backward. On the CPU the collectives block inside them. On an accelerator
they run in other streams, and the stream that computes waits inside them, so events recorded in it before and after
bracket the wait. The copies and casts into and out of the flat buffers happen there too, and are counted: without
sharding there were none. An overlapped collective costs nothing here.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from torch import nn

from zeroamp.hooks._torch.fsdp import communication_methods


class CommunicationListener(Protocol):
    """Is called at both ends of each stretch of FSDP2's code that communicates."""

    def enter_communication(self) -> None:
        """It begins."""

    def leave_communication(self) -> None:
        """It ended, or raised."""


class CommunicationWatch:
    """Calls its listeners around each stretch of FSDP2's code that communicates. Changes nothing else.

    A root has one: of two, the one that ended first would take the other's methods away.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._listeners: tuple[CommunicationListener, ...] = ()  # replaced whole: may shrink during a call
        self._depth = 0  # one of these methods calls another
        self._watched: list[tuple[Any, str, Any]] = []
        """Object, name of a method, and the attribute of the instance before, or None."""

    def add(self, listener: CommunicationListener) -> None:
        """Call `listener` too. While there is one, an attribute of each instance hides the method of its class."""
        self._listeners = (*self._listeners, listener)
        if self._watched:
            return
        for owner, name in communication_methods(self._root):
            self._watched.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self._around(getattr(owner, name)))

    def remove(self, listener: CommunicationListener) -> None:
        """Stop calling `listener`. After the last listener is removed, the methods are restored."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        if self._listeners:
            return
        for owner, name, before in self._watched:
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)
        self._watched.clear()

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                for listener in self._listeners:
                    listener.enter_communication()
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    for listener in self._listeners:
                        listener.leave_communication()

        return watched
