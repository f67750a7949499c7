"""`Callback`: methods that are called while optimizer steps run. Whoever must hear of a step attaches through it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from zeroamp.training.step_report import StepReport

Phase = Literal["backward", "optimizer"]
""""backward" is the backward of one micro-batch. "optimizer" is the end of an optimizer step: norm, clip, update,
scheduler. If `clip_grad_norm` and `update` are called separately, each is one "optimizer" phase."""

Receive = Callable[[Sequence[float]], None]
"""Called with the sums over the ranks of the numbers that were returned with it: on a CPU in the same step, before the
update; on other devices in the next step, so that the host does not wait for the device."""


def _ignore(_sums: Sequence[float]) -> None:
    pass


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

    def statistics(self) -> tuple[Sequence[float], Receive]:
        """Return numbers to sum over the ranks in the step's all-reduce, and the function that gets the sums.

        All ranks must return equally many numbers in a step. After an error one rank may leave a `with` block before
        the others, so a callback with numbers stays in the list, and returns zeros from then on. The function may
        raise, on all ranks. On a CPU it is called before the update of this step, on other devices one step later.
        """
        return (), _ignore

    def before_update(self) -> None:
        """Called between the step's all-reduce and the update of the first optimizer. May issue collectives."""

    def on_step_end(self, report: StepReport, /) -> None:
        """Called after an optimizer step, taken or skipped, with gradients released. May raise, on all ranks alike."""

    def on_step_discarded(self) -> None:
        """Called after `zero_grad` discarded the current optimizer step."""


class Callbacks(list[Callback]):
    """The callbacks of one `TrainStep`. `of_model` are those that all `TrainStep`s of a model share."""

    def __init__(self, of_model: Sequence[Callback]) -> None:
        super().__init__()
        self._of_model = of_model

    def all(self) -> tuple[Callback, ...]:
        """Return a copy of the lists, because a callback may be removed while they are called."""
        return (*self._of_model, *self)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Call `on_phase_begin` on entry and `on_phase_end` on exit, on the callbacks that are listed on entry."""
        callbacks = self.all()
        for callback in callbacks:
            callback.on_phase_begin(phase)
        try:
            yield
        finally:
            for callback in callbacks:
                callback.on_phase_end(phase)
