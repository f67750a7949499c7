"""What may look on while a `TrainStep` runs. Watchers change nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from torch import nn

from zeroamp.training.report import StepReport

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

    is_in_window: bool = False
    """Whether a backward of this window has begun: who comes now would not see the whole of it."""

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Tell all of a phase. "optimizer" ends the window, also where it raises."""
        self.is_in_window = True
        for watcher in self:
            watcher.enter(phase)
        try:
            yield
        finally:
            for watcher in self:
                watcher.leave(phase)
            self.is_in_window = phase == "backward"

    def drop_window(self) -> None:
        """Tell all of a window that was given up."""
        self.is_in_window = False
        for watcher in self:
            watcher.drop_window()

    def step_done(self, report: StepReport) -> None:
        """Hand the report of a window to all."""
        for watcher in self:
            watcher.step_done(report)


StepObserver = Callable[[nn.Module], None]
"""Called with the wrapped root, on every rank, after a step was taken or skipped and its gradients are gone."""

_observers: list[StepObserver] = []


@contextmanager
def observe_steps(observer: StepObserver) -> Iterator[None]:
    """Call `observer` after every optimizer step inside the context."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def tell_observers(root: nn.Module) -> None:
    """Say that the model of `root` has made a step. What an observer raises, the step raises."""
    for observer in tuple(_observers):
        observer(root)
