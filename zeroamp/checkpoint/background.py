"""What a wrapped model knows of the checkpoints of its run."""

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn

from zeroamp.policies.errors import CheckpointError
from zeroamp.training.callbacks import Callback
from zeroamp.training.report import StepReport
from zeroamp.wrapping.rank_group import Agreement
from zeroamp.wrapping.state import WrapState

logger = logging.getLogger("zeroamp")

_of_root: "WeakKeyDictionary[nn.Module, Saving]" = WeakKeyDictionary()


def saving_of(state: WrapState) -> "Saving":
    """Return what is known of the checkpoints of a wrapped model."""
    return _of_root.setdefault(state.root, Saving())


@dataclass(eq=False)
class Saving(Callback):
    """The run's name, and the save that is in the background, if one is."""

    run: str | None = None
    """Names the run over all its restarts; the first rank's, from its first save or load on."""
    serial: int = 0
    """Of the checkpoint that was saved or loaded last, known to the first rank; 0: of none."""
    future: Future[Path] | None = None
    """Ends alike on all ranks: with the path, or with the error of whichever rank failed."""
    is_done: bool = False
    """Whether it has ended on all ranks, as far as they have looked."""
    signals: Agreement | None = None
    """For the main thread, while the background has the group of saving and loading."""

    def before_update(self) -> None:
        """Poll, at the same point of the step on all ranks."""
        self.look()

    def on_step_end(self, _report: StepReport) -> None:
        """Raise what the last poll found."""
        self.tell()

    def begin(self, future: Future[Path], signals: Agreement) -> None:
        """Take note of a save that all ranks began."""
        self.future, self.signals = future, signals

    def look(self) -> None:
        """See whether the save ended, on all ranks at the same call: a small all-reduce while there is one."""
        if self.future is not None and self.signals is not None:
            self.is_done = self.signals.all(self.future.done())

    def tell(self) -> None:
        """Raise what the last look found.

        Raises:
            CheckpointError: the save ended and failed.
        """
        if self.is_done:
            self.wait()

    def give_up(self) -> None:
        """Wait for the save; log its error, where what follows matters more than what failed."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("a save in the background failed: %s", error)

    def wait(self) -> None:
        """Wait for the save.

        Raises:
            CheckpointError: it failed.
        """
        future, self.future, self.is_done = self.future, None, False
        if future is not None:
            future.result()
