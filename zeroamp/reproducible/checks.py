"""What `zeroamp.reproducible` refuses: in a config, a model, an optimizer, and in the division of losses."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.optimizers.kinds import is_of_bitsandbytes
from zeroamp.planning.mesh import replicate_size, shard_size
from zeroamp.planning.plan import Plan
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, StepError, WrapError
from zeroamp.policies.policy import Policy
from zeroamp.wrapping.optimizer_hooks import ELEMENTWISE

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
    if policy.stage < 2:
        raise ConfigError(
            f"zeroamp.reproducible needs zero_optimization.stage 2 or 3, but the stage is {policy.stage}. Set it "
            "to 2, which needs less memory for gradients."
        )


def check_reproducible(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Raise if the bits of a run would depend on the number of ranks.

    Raises:
        ConfigError: the number of ranks is not a power of two, or there are replicas.
        WrapError: the model trains a 0-D parameter, or computes statistics over a micro-batch of each rank.
    """
    if replicate_size(mesh) > 1:
        raise ConfigError(
            f"{_WHY}, but replicas would be added last. Leave zeroamp.dp_replicate_size out, and pass no mesh of "
            "replicas. zeroamp.ranks_per_node may be set."
        )
    num_ranks = shard_size(mesh)
    if num_ranks & (num_ranks - 1) != 0:
        raise ConfigError(f"{_WHY}. The number of ranks must be a power of two, but is {num_ranks}. Change the number.")
    for param in () if plan.replicated is None else plan.replicated.params:
        if param.is_trainable:
            raise WrapError(
                f"{param.fqn} is a trainable 0-D parameter, whose gradient is not added in the order of "
                "zeroamp.reproducible. Give it the shape (1,), or freeze it."
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
