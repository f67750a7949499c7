"""What a wrapped model knows of the checkpoints of its run."""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from zeroamp.agreement import Agreement


@dataclass(slots=True)
class Saving:
    """The run's name, and the save that is in the background, if one is."""

    run: str | None = None
    """Names the run over all its restarts; the first rank's, from its first save or load on."""
    future: Future[Path] | None = None
    """Ends alike on all ranks: with the path, or with the error of whichever rank failed."""
    signals: Agreement | None = None
    """For the main thread, while the background has the group of saving and loading."""

    def begin(self, future: Future[Path], signals: Agreement) -> None:
        """Take note of a save that all ranks began."""
        self.future, self.signals = future, signals

    def check(self) -> None:
        """See whether the save is done, on all ranks at the same call: a small all-reduce while there is one.

        Raises:
            CheckpointError: it failed.
        """
        if self.future is not None and self.signals is not None and self.signals.all(self.future.done()):
            self.wait()

    def wait(self) -> None:
        """Wait for the save.

        Raises:
            CheckpointError: it failed.
        """
        future, self.future = self.future, None
        if future is not None:
            future.result()
