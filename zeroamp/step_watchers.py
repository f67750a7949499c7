"""What may look on while a `TrainStep` runs. Watchers change nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from zeroamp.step_report import StepReport

Phase = Literal["backward", "optimizer"]
""""backward" is that of one micro-batch, "optimizer" the end of a window: norm, clip, update, schedule."""


class StepWatcher(Protocol):
    """Is told what a `TrainStep` does."""

    def enter(self, phase: Phase) -> None:
        """A phase begins."""

    def leave(self, phase: Phase) -> None:
        """It ended, or raised."""

    def drop_window(self) -> None:
        """The window was given up, by `TrainStep.recover`."""

    def step_done(self, report: StepReport) -> None:
        """A window ended with this report, on all ranks."""


class StepWatchers(list[StepWatcher]):
    """The watchers of one `TrainStep`, told in their order."""

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Tell all of a phase."""
        for watcher in self:
            watcher.enter(phase)
        try:
            yield
        finally:
            for watcher in self:
                watcher.leave(phase)

    def drop_window(self) -> None:
        """Tell all of a window that was given up."""
        for watcher in self:
            watcher.drop_window()

    def step_done(self, report: StepReport) -> None:
        """Hand the report of a window to all."""
        for watcher in self:
            watcher.step_done(report)
