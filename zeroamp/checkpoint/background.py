"""`Saving`: the save that runs in the background while training goes on, and the run that the checkpoints belong to."""

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn

from zeroamp.policies.errors import CheckpointError
from zeroamp.training.callbacks import Callback
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import WrapState

logger = logging.getLogger("zeroamp")

_of_root: "WeakKeyDictionary[nn.Module, Saving]" = WeakKeyDictionary()


def saving_of(state: WrapState) -> "Saving":
    """Return what is known of the checkpoints of a wrapped model."""
    return _of_root.setdefault(state.root, Saving())


@dataclass(eq=False)
class Saving(Callback):
    """The run's name, and the save in the background. A training step calls it before each update and after it."""

    run: str | None = None
    """Names the run over all its restarts; the first rank's, set by the first save or load."""
    serial: int = 0
    """Of the checkpoint that was saved or loaded last, known to the first rank; 0: there was none."""
    future: Future[Path] | None = None
    """Ends with the path, or with the error of whichever rank failed: the same on all ranks."""
    is_done: bool = False
    """Whether the save had ended on all ranks at the last `poll`."""
    signals: RankGroup | None = None
    """For the main thread: the thread in the background uses the group for saving and loading."""

    def begin(self, future: Future[Path], signals: RankGroup) -> None:
        """Store a save that all ranks have just started."""
        self.future, self.signals = future, signals

    def poll(self) -> None:
        """Find out whether the save ended on all ranks. Every rank calls it: a small all-reduce while one runs."""
        if self.future is not None and self.signals is not None:
            self.is_done = self.signals.all(self.future.done())

    def before_update(self) -> None:
        """Poll: before the optimizer, which may raise on one rank alone."""
        self.poll()

    def on_step_end(self, _report: object) -> None:
        """Raise the error of a save that had failed at the last `poll`: on all ranks, after the step was taken."""
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
