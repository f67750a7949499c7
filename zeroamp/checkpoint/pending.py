"""What a `TrainStep` knows of the checkpoints of its run."""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Saving:
    """The run's name, and the save that is in the background, if one is."""

    run: str | None = None
    """Names the run over all its restarts; the first rank's, from its first save or load on."""
    future: Future[Path] | None = None
    """Ends alike on all ranks: with the path, or with the error of whichever rank failed."""

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed.
        """
        future, self.future = self.future, None
        if future is not None:
            future.result()
