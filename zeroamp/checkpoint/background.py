"""`Saving`: the checkpoint that is being saved in the background, and the run to which the checkpoints belong."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn

from zeroamp.policies.errors import CheckpointError
from zeroamp.training.callbacks import Callback, Receive
from zeroamp.wrapping.state import WrapState, wrap_state

logger = logging.getLogger("zeroamp")

_of_root: "WeakKeyDictionary[nn.Module, Saving]" = WeakKeyDictionary()


def saving_of(state: WrapState) -> "Saving":
    """Return the `Saving` of a wrapped model. The first call creates it."""
    if state.root not in _of_root:
        _of_root[state.root] = Saving(state)
    return _of_root[state.root]


def wait_for_save(model: nn.Module) -> None:
    """Wait until the background save of a wrapped model has ended. Call it on every rank.

    A loop calls it at its end, after saves with `save_checkpoint(..., async_=True)`.

    Raises:
        CheckpointError: the save failed.
        WrapError: the model is not wrapped.
    """
    saving_of(wrap_state(model)).wait()


class Saving(Callback):
    """The run's name and its background save.

    From the first background save on, it is a callback of the model, and the step's all-reduce has one more number: how
    many ranks are still saving.
    """

    def __init__(self, state: WrapState) -> None:
        self.run: str | None = None
        """Name of the run over all its restarts. The first save or load sets it. Checkpoints have the first rank's."""
        self.serial = 0
        """Serial of the checkpoint that was saved or loaded last; 0 if there was none. Valid on the first rank."""
        self.future: Future[Path] | None = None
        """Its result is the checkpoint's path, or the error of the rank that failed: the same on all ranks."""
        self.is_done = False
        """Whether the last all-reduce reported that the save has ended on all ranks."""
        self._callbacks = state.callbacks

    def begin(self, future: Future[Path]) -> None:
        """Follow a background save that all ranks have just started."""
        self.future = future
        if self not in self._callbacks:
            self._callbacks.append(self)

    def statistics(self) -> tuple[Sequence[float], Receive]:
        """Return 1 if this rank is still saving, 0 if not."""
        future = self.future

        def receive(sums: Sequence[float]) -> None:
            if future is not None and future is self.future:  # else the caller has waited for it
                self.is_done = sums[0] == 0

        return [float(future is not None and not future.done())], receive

    def on_step_end(self, _report: object) -> None:
        """If the background save has ended on all ranks, raise its error, if any: on all ranks, after the update."""
        if self.is_done:
            self.wait()

    def abandon(self) -> None:
        """Wait for the background save and log its error. Called before another save or a load, which run anyway."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("The save in the background failed: %s", error)

    def wait(self) -> None:
        """Wait for the background save, if there is one.

        Raises:
            CheckpointError: the save failed.
        """
        future, self.future, self.is_done = self.future, None, False
        if future is not None:
            future.result()
