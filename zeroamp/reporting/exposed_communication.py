"""Brackets exposed communication: the parts of a step in which computation may wait for a collective.

[Note: Exposed communication]
FSDP2 all-gathers in `unshard`, waits in `wait_for_unshard`, reduces in `post_backward`, and waits for the last
reductions in a callback at the end of the backward. On the CPU the collectives block the thread inside these methods.
On an accelerator the collectives run in other streams, and the compute stream waits inside these methods. So events
that are recorded in the compute stream before and after a method bracket the wait. The copies and casts into and out of
the flat buffers are counted too, because they exist only with sharding. A collective that overlaps with computation
counts nothing.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from torch import nn

from zeroamp.hooks._torch.fsdp import communication_methods


class CommunicationListener(Protocol):
    """Is called before and after each of FSDP2's methods that communicate. Nested calls count as one."""

    def enter_communication(self) -> None:
        """Handle the start of such a method."""

    def leave_communication(self) -> None:
        """Handle the end of such a method. Called also if it raised."""


class CommunicationWatch:
    """Calls its listeners before and after each of FSDP2's methods that communicate. Changes nothing else.

    Use `watch_of`. Of two for one root, the first one to remove its last listener would also remove the wrappers of the
    other.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._listeners: tuple[CommunicationListener, ...] = ()  # replaced whole: may shrink during a call
        self._depth = 0  # one of these methods calls another
        self._watched: list[tuple[Any, str, Any]] = []
        """Object, name of the wrapped method, and the instance attribute that the wrapper replaced, or None."""

    def add(self, listener: CommunicationListener) -> None:
        """Call `listener` too. The first listener wraps FSDP2's methods, by attributes of the instances."""
        self._listeners = (*self._listeners, listener)
        if self._watched:
            return
        for owner, name in communication_methods(self._root):
            self._watched.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self._around(getattr(owner, name)))

    def remove(self, listener: CommunicationListener) -> None:
        """Stop calling `listener`. Removing the last listener restores FSDP2's methods."""
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


def watch_of(root: nn.Module) -> CommunicationWatch:
    """Return the one watch of a wrapped model. It is an attribute of the root, so it lasts as long as the model."""
    watch: CommunicationWatch = vars(root).setdefault("_zeroamp_communication", CommunicationWatch(root))
    return watch
