"""`scheduler`: the learning rate over the steps. Meanings and defaults are DeepSpeed's (0.19.8)."""

from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from zeroamp.policies.schema.keys import Block, Honoured, Number, PositiveInt, Unsupported
from zeroamp.policies.schema.params import (
    LARGEST,
    MomentumPerGroup,
    NotNegative,
    PerGroup,
    known_type,
    typed_params,
)

SchedulerName = Literal["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

_PASS_IT = "Build it yourself and pass it to TrainStep(scheduler=)."

WarmupSteps = Annotated[PositiveInt, Honoured("optimizer steps of the warm-up; 1 counts as 2")]
TotalSteps = Annotated[PositiveInt, Honoured("optimizer steps of the run, warm-up included")]
WarmupType = Annotated[
    Literal["log", "linear"], Honoured("shape of the warm-up: the logarithm of the step, or the step")
]
Stairs = Annotated[int, Field(ge=-1)]
_SHORTEST = 1e-6


def _not_tiny(value: float | None) -> float | None:
    if value is not None and 0 < value < _SHORTEST:  # steps divided by it may be infinite
        raise ValueError(f"0, or from {_SHORTEST} on")
    return value


PartSteps = Annotated[NotNegative, AfterValidator(_not_tiny)]
"""Optimizer steps as DeepSpeed takes them, which may be a fraction; 0 is none."""


class _DeepSpeedParams(Block):
    """What all of DeepSpeed's schedulers take."""

    last_batch_iteration: Annotated[
        int, Unsupported("Remove it, and give the saved state to the scheduler's load_state_dict.", (-1,))
    ] = -1


class WarmupLRParams(_DeepSpeedParams):
    """`scheduler.params` of WarmupLR: up to a maximum, and constant there."""

    warmup_min_lr: Annotated[PerGroup, Honoured("learning rate at the start")] = 0.0
    warmup_max_lr: Annotated[
        PerGroup | None, Honoured("learning rate after the warm-up. Default: the optimizer's own, per param group")
    ] = None
    warmup_num_steps: WarmupSteps = 1000
    warmup_type: WarmupType = "log"


class WarmupDecayLRParams(_DeepSpeedParams):
    """`scheduler.params` of WarmupDecayLR: up to a maximum, then along a line to the minimum."""

    total_num_steps: TotalSteps
    warmup_min_lr: Annotated[PerGroup, Honoured("learning rate at the start and at the end")] = 0.0
    warmup_max_lr: Annotated[PerGroup, Honoured("learning rate after the warm-up")] = 0.001
    warmup_num_steps: WarmupSteps = 1000
    warmup_type: WarmupType = "log"


class WarmupCosineLRParams(_DeepSpeedParams):
    """`scheduler.params` of WarmupCosineLR: parts of the optimizer's own learning rate, per param group."""

    total_num_steps: TotalSteps
    warmup_min_ratio: Annotated[
        NotNegative, Honoured("part of the learning rate where the warm-up starts, at step 1; step 0 has 0")
    ] = 0.0
    warmup_num_steps: WarmupSteps = 1000
    cos_min_ratio: Annotated[NotNegative, Honoured("part of the learning rate at the end and after")] = 0.0001
    warmup_type: WarmupType = "log"


class OneCycleParams(_DeepSpeedParams):
    """`scheduler.params` of OneCycle: up and down once, then decay; the momentum goes the other way."""

    cycle_min_lr: Annotated[PerGroup, Honoured("learning rate at both ends of the cycle")]
    cycle_max_lr: Annotated[PerGroup, Honoured("learning rate at its top")]
    decay_lr_rate: Annotated[
        NotNegative, Honoured("after the cycle: the learning rate is divided by 1 + this per decay_step_size steps")
    ] = 0.0
    cycle_first_step_size: Annotated[Number, Field(ge=_SHORTEST, le=LARGEST), Honoured("steps of the way up")] = 2000.0
    cycle_second_step_size: Annotated[PartSteps | None, Honoured("steps of the way down. Default: as many as up")] = (
        None
    )
    cycle_first_stair_count: Annotated[Stairs, Honoured("stairs of the way up; 0 or -1: none")] = 0
    cycle_second_stair_count: Annotated[
        Stairs | None, Honoured("stairs of the way down; 0 or -1: none. Default: as many as up")
    ] = None
    decay_step_size: Annotated[PartSteps, Honoured("steps of the decay's unit; 0: no decay")] = 0.0
    cycle_momentum: Annotated[
        bool, Honoured("set betas to (momentum, 0.99) at every step; false for an optimizer without betas")
    ] = True
    cycle_min_mom: Annotated[MomentumPerGroup, Honoured("momentum at the top of the cycle, and at step 0")] = 0.8
    cycle_max_mom: Annotated[MomentumPerGroup, Honoured("momentum at both ends of the cycle")] = 0.9
    decay_mom_rate: Annotated[
        Number,
        Field(ge=-LARGEST, le=LARGEST),
        Honoured("after the cycle: the momentum is multiplied by 1 + this per decay_step_size steps"),
    ] = 0.0


class LRRangeTestParams(_DeepSpeedParams):
    """`scheduler.params` of LRRangeTest: up without end, to see where training diverges."""

    lr_range_test_min_lr: Annotated[PerGroup, Honoured("learning rate at the start")] = 1e-3
    lr_range_test_step_size: Annotated[PositiveInt, Honoured("steps of the unit of the rate")] = 2000
    lr_range_test_step_rate: Annotated[
        NotNegative, Honoured("the learning rate grows by this part of its start per unit")
    ] = 1.0
    lr_range_test_staircase: Annotated[bool, Honoured("grow at the end of a unit, not at every step")] = False


SCHEDULER_PARAMS: dict[str, type[Block]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupLR": WarmupLRParams,
}
"""The block of `scheduler.params`, by `scheduler.type`."""


def _known_name(value: object) -> object:
    """Return the name as DeepSpeed writes it."""
    elsewhere = {name for name in dir(torch.optim.lr_scheduler) if name[0].isupper()}
    return known_type(value, SCHEDULER_PARAMS, elsewhere, _PASS_IT)


class SchedulerBlock(Block):
    """`scheduler`: built by `scheduler_from_config`; nothing else reads it."""

    type: Annotated[SchedulerName, BeforeValidator(_known_name), Honoured("its name; case does not matter")]
    params: Annotated[
        LRRangeTestParams | OneCycleParams | WarmupCosineLRParams | WarmupDecayLRParams | WarmupLRParams,
        Honoured("its arguments, as their own tables list them by type"),
    ] = Field(default=None, validate_default=True)

    @field_validator("params", mode="wrap")
    @classmethod
    def _of_the_type(cls, value: object, _: object, info: ValidationInfo) -> object:
        # Without a type the type's own error is the one to read, and no keys of params are right or wrong.
        return typed_params(value, SCHEDULER_PARAMS[info.data["type"]]) if "type" in info.data else value
