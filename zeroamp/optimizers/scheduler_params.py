"""The keys of `scheduler.params`: learning rates. Meanings and defaults are DeepSpeed's (0.19.8)."""

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


SCHEDULER_PARAMS: dict[str, type[Block]] = {
    "WarmupCosineLR": WarmupCosineLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupLR": WarmupLRParams,
}
"""The block of `scheduler.params`, by `scheduler.type`."""

TYPES = TypedParams(blocks=SCHEDULER_PARAMS, build_it=_PASS_IT)
"""Loaded by the schema for a config with a `scheduler`."""
