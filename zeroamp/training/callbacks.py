"""`Callback`: methods that `TrainStep` calls while it runs. Reporting attaches through it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from zeroamp.training.step_report import StepReport

Phase = Literal["backward", "optimizer"]
""""backward" is the backward of one micro-batch. "optimizer" is the end of an optimizer step: norm, clip, update,
scheduler. If `clip_grad_norm` and `update` are called separately, each is one "optimizer" phase."""


class Callback:
    """Base class of callbacks. Override methods, and append an instance to `TrainStep.callbacks`.

    Callbacks are called in the order of the list, on every rank. Unless a method says otherwise, they must not change
    gradients or parameters, must issue the same collectives on all ranks, and must not raise.

    ```python
    class PrintLoss(zeroamp.Callback):
        def on_step_end(self, report):
            print(report.step, report.loss)  # waits for the device

    train.callbacks.append(PrintLoss())
    ```
    """

    def on_phase_begin(self, phase: Phase, /) -> None:
        """Called when a phase begins."""

    def on_phase_end(self, phase: Phase, /) -> None:
        """Called when a phase ends, also if it raised."""

    def statistics(self) -> Sequence[float]:
        """Return numbers to sum over ranks in the step's all-reduce: the same count at every step, on all ranks."""
        return ()

    def on_statistics(self, sums: torch.Tensor, /) -> None:
        """Called before the update with the sums of `statistics`, 1-D fp64 on the device. May raise, on all ranks."""

    def before_update(self) -> None:
        """Called between the step's all-reduce and the update. May issue collectives."""

    def on_step_end(self, report: StepReport, /) -> None:
        """Called after an optimizer step, taken or skipped, with gradients released. May raise, on all ranks alike."""

    def on_step_discarded(self) -> None:
        """Called after `zero_grad` discarded the current optimizer step."""


class Callbacks(list[Callback]):
    """The callbacks of one `TrainStep`."""

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Call `on_phase_begin` on entry and `on_phase_end` on exit, on the callbacks that are listed on entry."""
        callbacks = tuple(self)  # a copy: a callback may be removed during the phase
        for callback in callbacks:
            callback.on_phase_begin(phase)
        try:
            yield
        finally:
            for callback in callbacks:
                callback.on_phase_end(phase)


StepObserver = Callable[[nn.Module], None]
"""Called with the wrapped root, on every rank, after a step was taken or skipped and its gradients released."""

_observers: list[StepObserver] = []


@contextmanager
def observe_steps(observer: StepObserver) -> Iterator[None]:
    """Call `observer` inside the context after every optimizer step of this process.

    For a profiler that starts before the `TrainStep` is built. An error of an observer is raised by `TrainStep.step`.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def call_observers(root: nn.Module) -> None:
    """Call all observers with `root`, the wrapped model of the optimizer step that ended."""
    for observer in tuple(_observers):
        observer(root)
