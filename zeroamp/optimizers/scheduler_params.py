"""The keys of `scheduler.params`: learning rates. Meanings and defaults are DeepSpeed's (0.19.8)."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from zeroamp.optimizers.typed_params import LARGEST, MomentumPerGroup, NotNegative, PerGroup, TypedParams
from zeroamp.policies.schema.keys import Block, Honoured, Number, PositiveInt, Unsupported

_PASS_IT = "Build the scheduler yourself and pass it to TrainStep(scheduler=)."

OF_TORCH = (
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"),
    *("ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR"),
    *("ReduceLROnPlateau", "SequentialLR", "StepLR"),
)
"""The schedulers of torch 2.13."""

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
"""A number of optimizer steps, which may be a fraction, as in DeepSpeed. 0 stands for none."""


class _DeepSpeedParams(Block):
    """The key that `scheduler.params` has for every type."""

    last_batch_iteration: Annotated[
        int, Unsupported("Remove it, and pass the saved state to the scheduler's load_state_dict.", (-1,))
    ] = -1


class WarmupLRParams(_DeepSpeedParams):
    """`scheduler.params` of WarmupLR: rises to a maximum, and is constant then."""

    warmup_min_lr: Annotated[PerGroup, Honoured("learning rate at the start")] = 0.0
    warmup_max_lr: Annotated[
        PerGroup | None, Honoured("learning rate after the warm-up. Default: the optimizer's own, per param group")
    ] = None
    warmup_num_steps: WarmupSteps = 1000
    warmup_type: WarmupType = "log"


class WarmupDecayLRParams(_DeepSpeedParams):
    """`scheduler.params` of WarmupDecayLR: rises to a maximum, then falls linearly to the minimum."""

    total_num_steps: TotalSteps
    warmup_min_lr: Annotated[PerGroup, Honoured("learning rate at the start and at the end")] = 0.0
    warmup_max_lr: Annotated[PerGroup, Honoured("learning rate after the warm-up")] = 0.001
    warmup_num_steps: WarmupSteps = 1000
    warmup_type: WarmupType = "log"


class WarmupCosineLRParams(_DeepSpeedParams):
    """`scheduler.params` of WarmupCosineLR: ratios to the optimizer's own learning rate, per param group."""

    total_num_steps: TotalSteps
    warmup_min_ratio: Annotated[
        NotNegative, Honoured("ratio to the learning rate at step 1, where the warm-up starts. Step 0 has 0")
    ] = 0.0
    warmup_num_steps: WarmupSteps = 1000
    cos_min_ratio: Annotated[NotNegative, Honoured("ratio to the learning rate at the last step and after it")] = 0.0001
    warmup_type: WarmupType = "log"


class OneCycleParams(_DeepSpeedParams):
    """`scheduler.params` of OneCycle: rises and falls once, then decays. The momentum moves inversely."""

    cycle_min_lr: Annotated[PerGroup, Honoured("learning rate at both ends of the cycle")]
    cycle_max_lr: Annotated[PerGroup, Honoured("learning rate at the top of the cycle")]
    decay_lr_rate: Annotated[
        NotNegative, Honoured("after the cycle: the learning rate is divided by 1 + this per decay_step_size steps")
    ] = 0.0
    cycle_first_step_size: Annotated[Number, Field(ge=_SHORTEST, le=LARGEST), Honoured("steps of the rise")] = 2000.0
    cycle_second_step_size: Annotated[PartSteps | None, Honoured("steps of the fall. Default: as many as rising")] = (
        None
    )
    cycle_first_stair_count: Annotated[Stairs, Honoured("stairs of the rise; 0 or -1: none")] = 0
    cycle_second_stair_count: Annotated[
        Stairs | None, Honoured("stairs of the fall; 0 or -1: none. Default: as many as rising")
    ] = None
    decay_step_size: Annotated[PartSteps, Honoured("number of steps after which the decay counts one; 0: no decay")] = (
        0.0
    )
    cycle_momentum: Annotated[
        bool, Honoured("set betas to (momentum, 0.99) in each step; write false for an optimizer without betas")
    ] = True
    cycle_min_mom: Annotated[MomentumPerGroup, Honoured("momentum at the top of the cycle, and at step 0")] = 0.8
    cycle_max_mom: Annotated[MomentumPerGroup, Honoured("momentum at both ends of the cycle")] = 0.9
    decay_mom_rate: Annotated[
        Number,
        Field(ge=-LARGEST, le=LARGEST),
        Honoured("after the cycle: the momentum is multiplied by 1 + this per decay_step_size steps"),
    ] = 0.0


class LRRangeTestParams(_DeepSpeedParams):
    """`scheduler.params` of LRRangeTest: rises without end, to find the learning rate at which training diverges."""

    lr_range_test_min_lr: Annotated[PerGroup, Honoured("learning rate at the start")] = 1e-3
    lr_range_test_step_size: Annotated[PositiveInt, Honoured("steps in which the learning rate grows once")] = 2000
    lr_range_test_step_rate: Annotated[
        NotNegative, Honoured("growth per `lr_range_test_step_size` steps, as a part of the learning rate at the start")
    ] = 1.0
    lr_range_test_staircase: Annotated[
        bool, Honoured("grow once per `lr_range_test_step_size` steps, instead of a little in each step")
    ] = False


SCHEDULER_PARAMS: dict[str, type[Block]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupLR": WarmupLRParams,
}
"""The block of `scheduler.params`, by `scheduler.type`."""

TYPES = TypedParams(blocks=SCHEDULER_PARAMS, others=frozenset(OF_TORCH), build_it=_PASS_IT)
"""Loaded by the schema for a config with a `scheduler`."""
