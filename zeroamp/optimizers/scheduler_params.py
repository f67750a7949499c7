"""The keys of `scheduler.params`, and the learning rates that they give: those of DeepSpeed (0.19.8).

Steps are numbered k = 0, 1, 2, … DeepSpeed advances a scheduler after each step, and counts from the first advance:
its iteration is k - 1. Step 0 has the values that DeepSpeed's constructors set. Formulas have DeepSpeed's order of
operations, so that the results are the same bits.

[Note: first steps]
In a warm-up, steps 0 and 1 have the same learning rate: that of iteration 0. The exception is WarmupCosineLR, which is
0 at step 0 with any warmup_min_ratio.
"""

import math
from typing import Annotated, Literal

from zeroamp.optimizers.typed_params import NotNegative, PerGroup, TypedParams
from zeroamp.policies.schema.keys import Block, Honoured, PositiveInt, Unsupported

_PASS_IT = (
    "Build the scheduler yourself and pass it to TrainStep(scheduler=). torch.optim.lr_scheduler has CyclicLR in place "
    "of OneCycle, and LambdaLR in place of LRRangeTest."
)

WarmupSteps = Annotated[PositiveInt, Honoured("optimizer steps of the warm-up; 1 counts as 2")]
TotalSteps = Annotated[PositiveInt, Honoured("optimizer steps of the run, warm-up included")]
WarmupType = Annotated[
    Literal["log", "linear"], Honoured("shape of the warm-up: the logarithm of the step, or the step")
]


class Curve(Block):
    """The key that `scheduler.params` has for every type, and the learning rate as a function of the step."""

    last_batch_iteration: Annotated[
        int, Unsupported("Remove it, and pass the saved state to the scheduler's load_state_dict.", (-1,))
    ] = -1

    def lr(self, step: int, initial_lr: float, group: int) -> float:
        """Return the learning rate of a param group at `step`, from 0 on.

        `initial_lr`: the one that the optimizer was built with. `group`: the number of the param group.
        """
        raise NotImplementedError


class WarmupLRParams(Curve):
    """`scheduler.params` of WarmupLR: rises to a maximum, and is constant then."""

    warmup_min_lr: Annotated[PerGroup, Honoured("learning rate at the start")] = 0.0
    warmup_max_lr: Annotated[
        PerGroup | None, Honoured("learning rate after the warm-up. Default: the optimizer's own, per param group")
    ] = None
    warmup_num_steps: WarmupSteps = 1000
    warmup_type: WarmupType = "log"

    def lr(self, step: int, initial_lr: float, group: int) -> float:
        """Return min + (max - min) * gamma, where gamma rises from 0 to 1 in the warm-up."""
        num_steps, iteration = _num_warmup_steps(self.warmup_num_steps), max(0, step - 1)
        low = _of_group(self.warmup_min_lr, group)
        top = initial_lr if self.warmup_max_lr is None else _of_group(self.warmup_max_lr, group)
        gamma = _warmup(iteration, num_steps, self.warmup_type) if iteration < num_steps else 1.0
        return low + (top - low) * gamma


class WarmupDecayLRParams(Curve):
    """`scheduler.params` of WarmupDecayLR: rises to a maximum, then falls linearly to the minimum."""

    total_num_steps: TotalSteps
    warmup_min_lr: Annotated[PerGroup, Honoured("learning rate at the start and at the end")] = 0.0
    warmup_max_lr: Annotated[PerGroup, Honoured("learning rate after the warm-up")] = 0.001
    warmup_num_steps: WarmupSteps = 1000
    warmup_type: WarmupType = "log"

    def lr(self, step: int, initial_lr: float, group: int) -> float:  # noqa: ARG002
        """Return min + (max - min) * gamma, where gamma rises from 0 to 1 and falls back to 0."""
        num_steps, iteration = _num_warmup_steps(self.warmup_num_steps), max(0, step - 1)
        if iteration < num_steps:
            gamma = _warmup(iteration, num_steps, self.warmup_type)
        else:
            gamma = max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - num_steps))
        low = _of_group(self.warmup_min_lr, group)
        return low + (_of_group(self.warmup_max_lr, group) - low) * gamma


class WarmupCosineLRParams(Curve):
    """`scheduler.params` of WarmupCosineLR: ratios to the optimizer's own learning rate, per param group."""

    total_num_steps: TotalSteps
    warmup_min_ratio: Annotated[
        NotNegative, Honoured("ratio to the learning rate at step 1, where the warm-up starts. Step 0 has 0")
    ] = 0.0
    warmup_num_steps: WarmupSteps = 1000
    cos_min_ratio: Annotated[NotNegative, Honoured("ratio to the learning rate at the last step and after it")] = 0.0001
    warmup_type: WarmupType = "log"

    def lr(self, step: int, initial_lr: float, group: int) -> float:  # noqa: ARG002
        """Return the initial learning rate times the ratio; 0 at step 0 ([Note: first steps])."""
        return initial_lr * (self._ratio(step - 1) if step > 0 else 0.0)

    def _ratio(self, iteration: int) -> float:
        num_steps = _num_warmup_steps(self.warmup_num_steps)
        if iteration < num_steps:
            risen = _warmup(iteration, num_steps, self.warmup_type)
            return self.warmup_min_ratio + risen * (1.0 - self.warmup_min_ratio)
        # The first iteration after the warm-up is already one step down. After the last step the ratio is constant.
        progress = min(1.0, (iteration - num_steps + 1) / max(1, self.total_num_steps - num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)


def _of_group(value: float | tuple[float, ...], group: int) -> float:
    return value[group] if isinstance(value, tuple) else value


def _warmup(iteration: int, num_steps: int, kind: str) -> float:
    """Return the progress of the warm-up at an iteration below `num_steps`: from 0 to 1 (log), to below 1 (linear)."""
    if kind == "linear":
        return iteration / num_steps
    return (1.0 / math.log(num_steps)) * math.log(iteration + 1)


def _num_warmup_steps(asked: int) -> int:
    return max(2, asked)  # the formula divides by the logarithm, which is 0 for 1


SCHEDULER_PARAMS: dict[str, type[Curve]] = {
    "WarmupCosineLR": WarmupCosineLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupLR": WarmupLRParams,
}
"""The block of `scheduler.params`, by `scheduler.type`."""

TYPES = TypedParams(blocks=SCHEDULER_PARAMS, build_it=_PASS_IT)
"""Loaded by the schema for a config with a `scheduler`."""
