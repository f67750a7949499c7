"""`Callback`: what is called while a `TrainStep` runs. Everything outside of the core that follows a step is one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from zeroamp.training.step_report import StepReport

Phase = Literal["backward", "optimizer"]
""""backward" is that of one micro-batch, "optimizer" the end of an optimizer step: norm, clip, update, schedule. With
`clip_grad_norm` and `update` called apart, there are two of the latter."""


class Callback:
    """Base class of what follows a `TrainStep`: override methods, and add an instance to `TrainStep.callbacks`.

    Callbacks are called in the order of the list, on every rank. Unless a method says otherwise, they must not change
    gradients or parameters, must issue the same collectives on all ranks or none, and must not raise.

    ```python
    class PrintLoss(zeroamp.Callback):
        def on_step_end(self, report):
            print(report.step, report.loss)  # waits for the device

    train.callbacks.append(PrintLoss())
    ```
    """

    def on_phase_begin(self, phase: Phase, /) -> None:
        """A phase begins."""

    def on_phase_end(self, phase: Phase, /) -> None:
        """A phase ended, or raised."""

    def statistics(self) -> Sequence[float]:
        """Return numbers to sum over ranks in the step's one all-reduce; always as many, on all ranks."""
        return ()

    def on_statistics(self, sums: torch.Tensor, /) -> None:
        """The sums of `statistics`, fp64, on the device. Nothing is updated yet. May raise, on all ranks alike."""

    def on_no_gradient(self, error: Exception, /) -> None:
        """This rank has no gradient and will raise `error` instead of taking part in the step's all-reduce."""

    def before_update(self) -> None:
        """The step's all-reduce is done, the update follows. May issue collectives."""

    def on_step_end(self, report: StepReport, /) -> None:
        """The optimizer step was taken or skipped, and its gradients are gone. May raise, on all ranks alike."""

    def on_step_discarded(self) -> None:
        """The micro-batches of this optimizer step were given up by `zero_grad` or `recover`."""


class Callbacks(list[Callback]):
    """The callbacks of one `TrainStep`."""

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Call all that are there when a phase begins, then and at its end."""
        callbacks = tuple(self)  # one may leave, with what it watches, at any moment
        for callback in callbacks:
            callback.on_phase_begin(phase)
        try:
            yield
        finally:
            for callback in callbacks:
                callback.on_phase_end(phase)


StepObserver = Callable[[nn.Module], None]
"""Called with the wrapped root, on every rank, after a step was taken or skipped and its gradients are gone."""

_observers: list[StepObserver] = []


@contextmanager
def observe_steps(observer: StepObserver) -> Iterator[None]:
    """Call `observer` after every optimizer step of this process inside the context.

    For a profiler that is there before the `TrainStep` that it follows. What an observer raises, the step raises.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def tell_observers(root: nn.Module) -> None:
    """Call all observers after an optimizer step of the model of `root`."""
    for observer in tuple(_observers):
        observer(root)
