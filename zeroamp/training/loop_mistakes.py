"""Raises if a loop also makes a call that `TrainStep` makes: `zero_grad` between micro-batches, a scheduler's `step`.

An optimizer that the loop steps too is refused by `zeroamp/wrapping/optimizer_hooks.py`.
"""

from collections.abc import Sequence

import torch

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import StepError
from zeroamp.training.refused_arguments import Scheduler


class EarlierGradients:
    """The gradients that the earlier micro-batches of an optimizer step have left. Reads no values of them."""

    def __init__(self) -> None:
        self._left: list[tuple[torch.Tensor, int]] = []  # parameter -> version of its gradient

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note which of these parameters have a gradient. Call after each micro-batch but the last."""
        self._left = [(each, each.grad._version) for each in parameters if each.grad is not None]

    def check(self) -> None:
        """Raise StepError if a gradient is gone, or was set to zero. Call before each micro-batch but the first.

        Nothing else changes, so that `TrainStep.zero_grad` may discard the optimizer step, and the loop may go on.
        """
        changed = []
        for parameter, version in self._left:
            if parameter.grad is None:
                raise _was_zeroed()
            if parameter.grad._version != version:
                changed.append(parameter.grad)
        # Only if something has written into the gradients, the host reads them.
        if changed and not any(bool(local_part(gradient).any()) for gradient in changed):
            raise _was_zeroed()
        self._left = []


def _was_zeroed() -> StepError:
    return StepError(
        "zero_grad() was called between two micro-batches of an optimizer step, so the gradients of the earlier ones "
        "are lost. TrainStep discards gradients itself, after the update: remove the call of optimizer.zero_grad() or "
        "model.zero_grad(). To discard an optimizer step, call train.zero_grad()."
    )


class SchedulerSteps:
    """Steps the schedulers of a `TrainStep`, and raises if the loop steps one of them too."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[Scheduler, object]] = {}  # position -> scheduler, its `last_epoch` after our step

    def step(self, position: int, scheduler: Scheduler) -> None:
        """Step the scheduler at a position of `TrainStep.schedulers`."""
        scheduler.step()
        self._left[position] = scheduler, getattr(scheduler, "last_epoch", None)

    def check(self) -> None:
        """Raise StepError if a scheduler has moved on since `step`. Schedulers without `last_epoch` are not checked."""
        for scheduler, left in self._left.values():
            now = getattr(scheduler, "last_epoch", None)
            if isinstance(now, int) and isinstance(left, int) and now > left:
                self.forget()  # the next optimizer step is not refused for the same call
                raise StepError(
                    f"{type(scheduler).__name__}.step was called by the loop, but TrainStep steps this scheduler after "
                    f"each update: last_epoch is {now}, and TrainStep left it at {left}. Remove the call, or do not "
                    "pass the scheduler to TrainStep. If scheduler.load_state_dict was called, also call "
                    "train.load_state_dict."
                )

    def forget(self) -> None:
        """Accept the present state of all schedulers, because it was loaded."""
        self._left.clear()
