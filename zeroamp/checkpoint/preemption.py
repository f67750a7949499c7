"""`Preemption`: turns a signal that any rank received into a last save on all ranks."""

import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any, Self

from torch import nn

from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import wrap_state


class Preemption:
    """A context in which a signal asks for a last save instead of ending the process.

    ```python
    with zeroamp.Preemption(model) as preemption:
        for batch in loader:
            ...
            if train.step() is not None and preemption.is_requested():
                zeroamp.save_checkpoint(folder, model, train)
                break
    ```

    torchrun passes SIGTERM on to its ranks and kills those that run on after 30 s, so a step and a save must take less.
    """

    def __init__(self, model: nn.Module, signals: Iterable[int] = (signal.SIGTERM,)) -> None:
        """Make a process group of the ranks of a wrapped model, so all of them construct this.

        Raises:
            WrapError: `model` is not wrapped.
        """
        self._ranks = RankGroup.for_signals(wrap_state(model).mesh)
        self._signals = tuple(signals)
        self._handlers: dict[int, Any] = {}
        self._was_received = False

    def __enter__(self) -> Self:
        """Take over the signals. Python allows this in the main thread only."""
        self._handlers = {number: signal.signal(number, self._receive) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that the signals had before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def is_requested(self) -> bool:
        """Return whether any rank received a signal, the same on all. All call this: it is one small all-reduce."""
        return self._ranks.any(self._was_received)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self._was_received = True
