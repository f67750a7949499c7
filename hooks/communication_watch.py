"""Says when communication is exposed: when the thread, or the stream that computes, may wait for a collective.

[Note: Exposed communication]
FSDP2 gathers in `unshard`, waits in `wait_for_unshard`, reduces in `post_backward` and waits for the last reductions in
a callback at the end of the backward. On the CPU the collectives block inside them. On an accelerator they run in other
streams, and the stream that computes waits inside them, so events recorded in it before and after bracket the wait.
The copies and casts into and out of the flat buffers happen there too, and are counted: without sharding there were
none. An overlapped collective costs nothing here.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from zeroamp.hooks._fsdp import communication_methods


class CommunicationWatch:
    """Calls `enter` and `leave` around each stretch of FSDP2's code that communicates. Changes nothing else."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._depth = 0  # one of these methods calls another
        self._watched: list[tuple[Any, str]] = []

    def attach(self, root: nn.Module) -> None:
        """Begin. An attribute of the instance hides the method of its class, which is there again after `detach`."""
        for owner, name in communication_methods(root):
            setattr(owner, name, self._around(getattr(owner, name)))
            self._watched.append((owner, name))

    def detach(self) -> None:
        """End it."""
        for owner, name in self._watched:
            delattr(owner, name)
        self._watched.clear()

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._enter()
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._leave()

        return watched
