"""Writes the summary and the warnings that `wrap_model` logs: parameters, bytes per rank, units and groups."""

from collections import Counter

import torch
from torch import nn

from zeroamp.planning.group_dtypes import PER_OP, group_dtypes
from zeroamp.planning.groups import GroupPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import param_memory
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import some_of
from zeroamp.policies.numbers import gib_text

UNCAST_FRACTION = 0.1
"""`wrap_model` warns if autocast leaves more than this fraction of the trainable elements in fp32, as 3-D tensors."""


def size_summary(plan: Plan, ranks: Ranks, *, name: str, seconds: float) -> str:
    """Return lines about the parameters, bytes per rank, units and groups of a model.

    Bytes are those of the ledger: shards, gradients at the optimizer step, and the unsharded parameters if all units
    were unsharded at once. Optimizer state is not counted, because there is no optimizer yet.

    Args:
        plan: of the model.
        ranks: the numbers of ranks of the mesh.
        name: of the model's class.
        seconds: the time that `wrap_model` took.
    """
    policy = plan.policy
    numel = sum(param.numel for param in plan.params)
    trainable = sum(param.numel for param in plan.params if param.is_trainable)
    memory = [_memory(group, plan, ranks) for group in plan.all_groups]
    stored, unsharded, gradients = (sum(column) for column in zip(*memory, strict=True)) if memory else (0, 0, 0)
    largest = max((unsharded_of_group for _, unsharded_of_group, _ in memory), default=0)
    communicated = [group for group in plan.all_groups if group.kind != "ignored"]
    sent = {g.name: group_dtypes(g.key, policy, ranks.of(is_expert=g.is_expert)).communication for g in communicated}
    kinds = Counter((g.kind, short_name(g.key.param), short_name(sent[g.name])) for g in communicated)
    groups = ", ".join(f"{n} {kind} {param}/{communication}" for (kind, param, communication), n in kinds.items())
    replicas = f" x {ranks.num_replicas} replicas" if (ranks.num_replicas or 1) > 1 else ""
    lines = [
        f"wrapped {name} in {seconds:.2f} s: mode {policy.mode}, ZeRO stage {policy.stage}, "
        f"{ranks.num_shards} shards{replicas}",
        f"  parameters: {numel:,}, {trainable:,} of them trainable{_low_share(plan)}",
        f"  per rank: {gib_text(stored)} of shards, {gib_text(gradients)} of gradients, and {gib_text(unsharded)} if "
        f"all were unsharded at once (the largest group: {gib_text(largest)}); optimizer state is not counted",
        f"  units: {len(plan.units) or 'none'} below the root{'' if plan.units else '; see auto_wrap_policy'}",
        f"  groups, as all-gathered/reduced: {groups}",
    ]
    if plan.ignored:
        numel = sum(group.numel for group in plan.ignored)
        lines.append(f"  ignored: {sum(len(g.params) for g in plan.ignored)} parameters, {numel:,} elements")
    return "\n".join(lines)


def _low_share(plan: Plan) -> str:
    text = plan.describe_low_share()
    return f": {text}" if text else ""


def describe_master_weights(model: nn.Module, plan: Plan) -> str | None:
    """Return a line about low-precision parameters that get fp32 master weights, or None. Call before sharding."""
    named = model.named_parameters()
    low = [p for fqn, p in named if stored_dtype(p) != p.dtype and fqn not in plan.ignored_fqns]
    if not low:
        return None
    numel = sum(parameter.numel() for parameter in low)
    dtypes = " and ".join(sorted({short_name(parameter.dtype) for parameter in low}))
    return (
        f"{len(low)} trainable parameters stored in {dtypes} ({gib_text(sum(p.nbytes for p in low))}) become fp32 "
        f"master weights ({gib_text(numel * torch.float32.itemsize)} over all shards)"
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


def _memory(group: GroupPlan, plan: Plan, ranks: Ranks) -> tuple[int, int, int]:
    """Return the bytes of a group's stored shards, of its unsharded parameters, and of its gradients."""
    num_shards = ranks.of(is_expert=group.is_expert).shards(plan.policy) or 1
    parts = [param_memory(param, plan.policy, num_shards) for param in group.params]
    return (
        sum(part.stored for part in parts),
        sum(part.unsharded for part in parts),
        sum(part.gradient for part in parts),
    )
