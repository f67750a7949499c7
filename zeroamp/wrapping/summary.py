"""Writes the line and the warnings that `wrap_model` logs."""

import torch
from torch import nn

from zeroamp.planning.group_dtypes import PER_OP
from zeroamp.planning.groups import GroupPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import param_memory
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import some_of
from zeroamp.policies.numbers import counted, size_text

UNCAST_FRACTION = 0.1
"""`wrap_model` warns if autocast leaves more than this fraction of the trainable elements in fp32, as 3-D tensors."""


def size_summary(plan: Plan, ranks: Ranks, *, name: str, seconds: float) -> str:
    """Return a line about what `wrap_model` did. `explain` has the dtypes and bytes.

    Args:
        plan: of the model.
        ranks: the numbers of ranks of the mesh.
        name: of the model's class.
        seconds: the time that `wrap_model` took.
    """
    numel = sum(param.numel for param in plan.params)
    trainable = sum(param.numel for param in plan.params if param.is_trainable)
    frozen = f" ({trainable:,} of them trainable)" * (trainable < numel)
    stored = sum(_stored_bytes(group, plan, ranks) for group in plan.all_groups)
    replicas = f" x {ranks.num_replicas} replicas" if (ranks.num_replicas or 1) > 1 else ""
    low = f", {text}" if (text := plan.describe_low_share()) else ""
    hint = "" if plan.units else " (see auto_wrap_policy)"
    return (
        f"wrapped {name} in {seconds:.2f} s: mode {plan.policy.mode}, ZeRO stage {plan.policy.stage}, "
        f"{counted(ranks.num_shards or 1, 'shard')}{replicas} of {size_text(stored)}, {numel:,} parameters{frozen}, "
        f"{counted(len(plan.units), 'FSDP unit')} below the root{hint}{low}"
    )


def describe_master_weights(model: nn.Module, plan: Plan) -> str | None:
    """Return a line about low-precision parameters that get fp32 master weights, or None. Call before sharding."""
    named = model.named_parameters()
    low = [p for fqn, p in named if stored_dtype(p) != p.dtype and fqn not in plan.ignored_fqns]
    if not low:
        return None
    numel = sum(parameter.numel() for parameter in low)
    dtypes = " and ".join(sorted({short_name(parameter.dtype) for parameter in low}))
    return (
        f"{len(low)} trainable parameters stored in {dtypes} ({size_text(sum(p.nbytes for p in low))}) become fp32 "
        f"master weights ({size_text(numel * torch.float32.itemsize)} over all shards)"
    )


def describe_uncast_experts(plan: Plan) -> str | None:
    """Return a warning if autocast leaves MoE experts of more than `UNCAST_FRACTION` of the elements in fp32."""
    trained = [param for param in plan.params if param.is_trainable]
    experts = [
        param
        for param in trained
        if len(param.shape) == 3 and param.dtypes.param == torch.float32 and param.dtypes.compute == PER_OP
    ]
    share = sum(param.numel for param in experts) / max(1, sum(param.numel for param in trained))
    if plan.policy.mode != "autocast" or share <= UNCAST_FRACTION:
        return None
    largest = max(experts, key=lambda param: param.numel)
    name, low = largest.fqn.rpartition(".")[2], short_name(plan.policy.param_dtype)
    return (
        f"{share:.0%} of the trainable elements are 3-D parameters that stay in fp32, such as {largest.fqn} "
        f"({largest.reason}): they are all-gathered and reduced in fp32. If torch._grouped_mm multiplies them, write "
        f'"zeroamp": {{"overrides": [{{"modules": ["*.{name}"], "param": "{low}"}}]}} in the config, with all of their '
        "names: see docs/moe.md."
    )


def describe_random_blocks(model: nn.Module, plan: Plan) -> str | None:
    """Return a warning if a config of transformers in the model says that blocks are skipped at random in training.

    None if the policy has `zeroamp.optional_units`.
    """
    if plan.policy.optional_units:
        return None
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    rates = {
        name: value
        for config in configs.values()
        for name, value in getattr(config, "__dict__", {}).items()
        if name.endswith("layerdrop") and isinstance(value, int | float) and value > 0
    }
    if not rates:
        return None
    return (
        f"The model's config has {some_of([f'{name}={value}' for name, value in rates.items()])}: in training, each "
        "rank skips different blocks at random. Ranks that run different units wait for each other until the backend's "
        'timeout, or reduce in another order, which is an error. Set layerdrop to 0, or name the blocks in "zeroamp": '
        '{"optional_units": [...]} (docs/ranks.md).'
    )


def _stored_bytes(group: GroupPlan, plan: Plan, ranks: Ranks) -> int:
    """Return the bytes of a group's shards on one rank."""
    num_shards = ranks.of(is_expert=group.is_expert).shards(plan.policy) or 1
    return sum(param_memory(param, plan.policy, num_shards).stored for param in group.params)
