"""What `zeroamp.reproducible` refuses: in a config, a model, an optimizer, and in the division of losses."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.optimizers.kinds import is_of_bitsandbytes
from zeroamp.planning.mesh import replicate_size, shard_size
from zeroamp.planning.plan import Plan
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, StepError, WrapError
from zeroamp.policies.policy import Policy
from zeroamp.reproducible.order import micro_batch_order
from zeroamp.training.optimizer_kinds import ELEMENTWISE

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WHY = "With zeroamp.reproducible, gradients are added as a binary tree over all micro-batches"


def check_config(policy: Policy) -> None:
    """Raise ConfigError for values with which the bits of a run would depend on the number of ranks."""
    fp32 = {
        "zeroamp.reduce_accumulate_dtype": policy.reduce_accumulate_dtype,
        "zeroamp.partials_between_nodes": policy.partials_between_nodes,
        "data_types.grad_accum_dtype": short_name(policy.grad_accum_dtype),
    }
    for key, value in fp32.items():
        if value != "fp32":
            raise ConfigError(
                f'{key} must be "fp32", but is "{value}". With zeroamp.reproducible, gradients are added in one order, '
                "in fp32. Remove the key."
            )
    if policy.stage == 1 and policy.communication_dtype != torch.float32:
        raise ConfigError(
            'communication_data_type must be "fp32" at stage 1 with zeroamp.reproducible, but is '
            f'"{short_name(policy.communication_dtype)}". Stage 1 sends sums of micro-batches, which would be rounded. '
            'Set it to "fp32", or use stage 2 or 3.'
        )
    for index, override in enumerate(policy.overrides):
        if policy.stage == 1 and override.communication in LOW_DTYPES:
            raise ConfigError(
                f'zeroamp.overrides.{index}.communication must be "fp32" at stage 1 with zeroamp.reproducible, but is '
                f'"{short_name(override.communication)}". Remove it, or use stage 2 or 3.'
            )


def check_reproducible(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Raise if the bits of a run would depend on the number of ranks.

    Raises:
        ConfigError: a number of ranks or micro-batches is not a power of two.
        WrapError: the model computes statistics over a micro-batch of each rank.
    """
    per_rank = plan.policy.gradient_accumulation_steps
    for number, what in ((shard_size(mesh), "ranks that shard"), (replicate_size(mesh), "replicas")):
        if not _is_power_of_two(number):
            raise ConfigError(
                f"{_WHY}. The number of {what} must be a power of two, but is {number}. Change the number."
            )
    order = micro_batch_order(plan.policy, mesh)
    if order.depends_on_count and not _is_power_of_two(per_rank):
        raise ConfigError(
            "gradient_accumulation_steps must be a power of two at stages 0 and 1 and with replicas, but is "
            f"{per_rank}. {_WHY}. Change the number, or use stage 2 or 3 without replicas."
        )
    for fqn, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) or getattr(module, "track_running_stats", False):
            raise WrapError(
                f"{fqn or 'The model'} is a {type(module).__name__}, whose statistics depend on the "
                "micro-batches that a rank sees. With zeroamp.reproducible, use nn.GroupNorm or nn.LayerNorm instead."
            )


def refuse_division(policy: Policy, *, divide: bool, others: bool | None) -> None:
    """Raise StepError if gradients would depend on the number of ranks, because of how losses are divided.

    `divide`: the argument of `TrainStep.backward`. `others`: that of the optimizer step's earlier micro-batches, or
    None before the first.
    """
    if others not in (None, divide):
        raise StepError(
            "TrainStep.backward got divide=True for some micro-batches of an optimizer step and False for others. "
            "With zeroamp.reproducible all gradients are divided by one number. Pass the same value for all of them."
        )
    if divide and policy.reduce == "sum":
        raise StepError(
            'TrainStep.backward got divide=True with zeroamp.reproducible and zeroamp.reduce "sum". The sum over ranks '
            "of means over each rank's micro-batches is larger on more ranks. Divide losses by a count over the "
            'micro-batches of all ranks and pass divide=False, or leave reduce at "mean".'
        )
    if not divide and policy.reduce == "mean" and policy.low_dtype == torch.float16:
        raise StepError(
            'TrainStep.backward got divide=False in float16 with zeroamp.reproducible and zeroamp.reduce "mean". The '
            "loop's own divisor then depends on the number of ranks, and in float16 small gradients underflow. Pass "
            'divide=True, or set reduce to "sum" and divide by a count over the micro-batches of all ranks. If the '
            "loop belongs to a library that divides losses itself, as transformers' Trainer does, use bfloat16."
        )


def refuse_dependence_on_shards(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
    """Raise StepError for an optimizer whose updates may depend on how parameters are sharded."""
    name = type(optimizer).__name__
    if is_of_bitsandbytes(optimizer):
        raise StepError(
            f"TrainStep was given bitsandbytes' {name} with zeroamp.reproducible. Its state is quantized in blocks of "
            "each rank's shard, so its updates depend on the number of ranks. Use torch.optim.AdamW."
        )
    if any(group.get("fused") and any(each.is_cpu for each in group["params"]) for group in optimizer.param_groups):
        # Fused Adam rounds the elements after the last full vector of a shard differently.
        raise StepError(
            f"TrainStep was given {name} with fused=True and parameters on the CPU, with zeroamp.reproducible. The "
            "fused kernels of the CPU may round the last elements of a shard differently, so updates would depend on "
            'the number of ranks. Pass fused=False; in TrainingArguments, optim="adamw_torch".'
        )
    if not (on_shards or type(optimizer) in ELEMENTWISE or type(optimizer) is torch.optim.Muon):
        raise StepError(
            f"TrainStep was given {name} with zeroamp.reproducible, but its updates may depend on the number of ranks. "
            "Use torch.optim.AdamW, another element-wise optimizer of torch, or torch.optim.Muon. "
            "If the optimizer is element-wise, pass on_shards=True."
        )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
