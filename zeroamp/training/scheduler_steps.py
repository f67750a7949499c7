"""Raises if a loop also steps a scheduler, which `TrainStep` steps.

Other calls that a loop and `TrainStep` both make: an optimizer that the loop steps too is refused by
`zeroamp/wrapping/optimizer_hooks.py`, and `zero_grad` between micro-batches by `zeroamp/training/gradients.py`.
"""

from zeroamp.policies.errors import StepError
from zeroamp.training.refused_arguments import Scheduler


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
