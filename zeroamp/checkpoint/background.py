"""`Saving`: the save that runs in the background while training goes on, and the run that the checkpoints belong to."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn

from zeroamp.checkpoint.tensors import PlanCache
from zeroamp.policies.errors import CheckpointError
from zeroamp.training.callbacks import Callback
from zeroamp.training.step_sums import Receive, step_sums_of
from zeroamp.wrapping.state import WrapState

logger = logging.getLogger("zeroamp")

_of_root: "WeakKeyDictionary[nn.Module, Saving]" = WeakKeyDictionary()


def saving_of(state: WrapState) -> "Saving":
    """Return what is known of the checkpoints of a wrapped model."""
    if state.root not in _of_root:
        _of_root[state.root] = Saving(state)
    return _of_root[state.root]


class Saving(Callback):
    """The run's name, and the save in the background. A training step calls it at its end.

    From the first background save on, each step's all-reduce has one more number: whether the save still runs on a
    rank.
    """

    def __init__(self, state: WrapState) -> None:
        self.run: str | None = None
        """Names the run over all its restarts; the first rank's, set by the first save or load."""
        self.serial = 0
        """Of the checkpoint that was saved or loaded last, known to the first rank; 0: there was none."""
        self.plans = PlanCache()
        self.future: Future[Path] | None = None
        """Ends with the path, or with the error of whichever rank failed: the same on all ranks."""
        self.is_done = False
        """Whether the save is known to have ended on all ranks."""
        self._sums = step_sums_of(state)

    def begin(self, future: Future[Path]) -> None:
        """Store a save that all ranks have just started."""
        self.future = future
        self._sums.put("saving", self._ask)

    def _ask(self) -> tuple[Sequence[float], Receive]:
        future = self.future

        def receive(sums: Sequence[float]) -> None:
            if future is not None and future is self.future:  # else the caller has waited for it
                self.is_done = sums[0] == 0

        return [float(future is not None and not future.done())], receive

    def on_step_end(self, _report: object) -> None:
        """Raise the error of a save that is known to have failed: on all ranks, after the step was taken."""
        if self.is_done:
            self.wait()

    def abandon(self) -> None:
        """Wait for the save and log its error, before a save or load that matters more."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("The save in the background failed: %s", error)

    def wait(self) -> None:
        """Wait for the save.

        Raises:
            CheckpointError: it failed.
        """
        future, self.future, self.is_done = self.future, None, False
        if future is not None:
            future.result()
