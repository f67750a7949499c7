"""`Preemption`: lets all ranks save a last checkpoint after a signal that any rank received."""

import signal
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, Self

from torch import nn

from zeroamp.rank_group import RankGroup
from zeroamp.training.callbacks import Callback, Receive
from zeroamp.wrapping.state import wrap_state


class Preemption:
    """A context in which a signal requests a last save instead of ending the process.

    ```python
    with zeroamp.Preemption(model) as preemption:
        for batch in loader:
            ...
            if train.step() is not None and preemption.is_requested():
                zeroamp.save_checkpoint(folder, model, train)
                break
    ```

    torchrun passes SIGTERM on to its ranks, and kills them after 30 s. So a step and a save together must take less.
    """

    def __init__(self, model: nn.Module, signals: Iterable[int] = (signal.SIGTERM,)) -> None:
        """Prepare to handle `signals`. Construct this on all ranks of the model between the same two optimizer steps.

        Raises:
            WrapError: `model` is not wrapped.
        """
        state = wrap_state(model)
        self._ranks = RankGroup.for_signals(state.axes.whole)
        self._step = state.step
        self._signals = tuple(signals)
        self._handlers: dict[int, Any] = {}
        self._was_received = False  # on this rank
        self._is_requested = False  # on any rank, as of the last exchange
        self._num_seen = self._step.num_summed  # at the last call of `is_requested`
        exchanges = [each for each in state.callbacks if isinstance(each, _Exchange) and each.signals == self._signals]
        if not exchanges:
            exchanges = [_Exchange(self._signals)]
            state.callbacks.extend(exchanges)
        self._open = exchanges[0].opened
        self._open.append(self)

    def __enter__(self) -> Self:
        """Install handlers of the signals. Python allows this only in the main thread."""
        self._handlers = {number: signal.signal(number, self._receive) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that the signals had before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self in self._open:
            self._open.remove(self)
        for outer in self._open[-1:]:  # earlier sums had the flag of the inner context
            outer._num_seen = self._step.num_summed

    def is_requested(self) -> bool:
        """Return whether any rank received a signal: the same on all ranks. All ranks call this at the same place.

        If an optimizer step of the model has ended since the last call, this reads the sums of a step's all-reduce: on
        a CPU of that step, on other devices of the step before it, so that the host does not wait. Otherwise the ranks
        exchange one small message.
        """
        num_sums = self._step.num_summed
        if num_sums == self._num_seen or self._open[-1:] != [self]:
            self._is_requested |= self._ranks.any(self._was_received)
        self._num_seen = num_sums
        return self._is_requested

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self._was_received = True


class _Exchange(Callback):
    """Adds to the step's all-reduce whether this rank received one of `signals`. All contexts of a model share it."""

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.signals = signals
        self.opened: list[Preemption] = []
        """The `Preemption`s whose context has not ended. The newest, which is last, handles the signals."""

    def statistics(self) -> tuple[Sequence[float], Receive]:
        """Return one number, 0 while no context is open."""
        newest = self.opened[-1] if self.opened else None

        def receive(sums: Sequence[float]) -> None:
            if newest is not None:
                newest._is_requested |= sums[0] > 0

        return [float(newest is not None and newest._was_received)], receive
