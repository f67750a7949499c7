"""The summary that `wrap_model` logs: parameters, bytes per rank, units and groups."""

from collections import Counter

import torch
from torch import nn

from zeroamp.planning.group_dtypes import PER_OP
from zeroamp.planning.groups import GroupPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.traffic import param_memory
from zeroamp.policies.dtypes import short_name, stored_dtype

MIB = 1024**2
UNCAST_FRACTION = 0.1
"""`wrap_model` warns if autocast leaves more than this fraction of the trainable elements in fp32, as 3-D tensors."""


def size_summary(plan: Plan, ranks: Ranks, *, name: str, seconds: float) -> str:
    """Return lines about parameters, bytes per rank, units and groups of a model; `seconds` is what wrapping took.

    Bytes are those of the ledger: shards as stored, gradients as kept until the optimizer step, and the unsharded
    parameters if all units were unsharded at once. The optimizer's state is not known yet.
    """
    policy = plan.policy
    numel = sum(param.numel for param in plan.params)
    trainable = sum(param.numel for param in plan.params if param.is_trainable)
    memory = [_memory(group, plan, ranks) for group in plan.all_groups]
    stored, unsharded, gradients = (sum(column) for column in zip(*memory, strict=True)) if memory else (0, 0, 0)
    largest = max((unsharded_of_group for _, unsharded_of_group, _ in memory), default=0)
    kinds = Counter((g.kind, short_name(g.key.param), short_name(g.key.communication)) for g in plan.all_groups)
    groups = ", ".join(f"{n} {kind} {param}/{communication}" for (kind, param, communication), n in kinds.items())
    modules = sum(len(plan.modules_of(unit)) for unit in plan.units)
    merged = f", merged of {modules} modules" if plan.merged else ""
    replicas = f" x {ranks.num_replicas} replicas" if (ranks.num_replicas or 1) > 1 else ""
    lines = [
        f"wrapped {name} in {seconds:.2f} s: mode {policy.mode}, ZeRO stage {policy.stage}, "
        f"{ranks.num_shards} shards{replicas}",
        f"  parameters: {numel:,}, {trainable:,} of them trainable",
        f"  per rank: {stored / MIB:,.1f} MiB of shards, {gradients / MIB:,.1f} MiB of gradients, and "
        f"{unsharded / MIB:,.1f} MiB if all were unsharded at once (the largest group: {largest / MIB:,.1f} MiB); "
        "optimizer state is not counted",
        f"  units: {len(plan.units)} below the root{merged}",
        f"  groups, as all-gathered/reduced: {groups}",
    ]
    return "\n".join(lines)


def describe_master_weights(model: nn.Module) -> str | None:
    """Return a line about the parameters that get fp32 master weights; None if there are none. Call before sharding."""
    low = [parameter for parameter in model.parameters() if stored_dtype(parameter) != parameter.dtype]
    if not low:
        return None
    numel = sum(parameter.numel() for parameter in low)
    dtypes = " and ".join(sorted({short_name(parameter.dtype) for parameter in low}))
    return (
        f"{len(low)} trainable parameters stored in {dtypes} ({sum(p.nbytes for p in low) / MIB:,.1f} MiB) become fp32 "
        f"master weights ({numel * torch.float32.itemsize / MIB:,.1f} MiB over all shards)"
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
    return (
        f"{share:.0%} of the trainable elements are 3-D parameters that stay in fp32, such as {experts[0].fqn}: they "
        "are all-gathered and reduced in fp32, and computed in fp32 by ops that autocast does not cast "
        '(torch._grouped_mm of MoE experts). Mode "bf16" runs them in low precision.'
    )


def _memory(group: GroupPlan, plan: Plan, ranks: Ranks) -> tuple[int, int, int]:
    """Return the bytes of a group's stored shards, of its unsharded parameters, and of its gradients."""
    parts = [param_memory(param, plan.policy, ranks.shards(plan.policy) or 1) for param in group.params]
    return (
        sum(part.stored for part in parts),
        sum(part.unsharded for part in parts),
        sum(part.gradient for part in parts),
    )
