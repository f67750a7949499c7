"""What one optimizer step moves over the wire, and what a rank holds: from a `Plan` and the numbers of ranks.

Pure: numbers only. Bytes are in the convention of `Traffic`, those of the unsharded tensor, so that what is planned
here and what `zeroamp.traffic(model)` counts in one step are equal: calls and bytes, per collective, dtype and group.

FSDP2 shards dimension 0, and pads it to a multiple of the ranks that shard. Of a parameter of shape (d0, …) a rank
holds ceil(d0 / ranks) rows, and ranks x ceil(d0 / ranks) rows are on the wire.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks.collectives.traffic import Collective, Traffic, TrafficKey
from zeroamp.planning.groups import GroupPlan, ParamDtypes, ParamPlan
from zeroamp.planning.mesh import replicate_size, shard_size
from zeroamp.planning.plan import Plan
from zeroamp.planning.replay import step_schedule
from zeroamp.planning.schedule import Schedule
from zeroamp.policies.accumulation import unsharded_accumulation
from zeroamp.policies.policy import Policy

STEP = "step"
"""The group under which `TrainStep`'s own collective is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The shape of the mesh."""

    num_shards: int | None = None
    """Ranks that one parameter is sharded over. None: not known, bytes are those without padding."""
    num_replicas: int | None = None
    """Ranks that hold the same shard. None: the mesh has no such axis, or (with `num_shards` None) it is not known."""

    def shards(self, policy: Policy) -> int | None:
        """Return the ranks that a parameter is sharded over: at stage 0 one, whatever else is known."""
        return 1 if policy.stage == 0 else self.num_shards


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """Return the shape of a mesh that `mesh_for_stage` returned."""
    return Ranks(num_shards=shard_size(mesh), num_replicas=replicate_size(mesh) if mesh.ndim == 2 else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCollective:
    """One kind of call that a group makes in a step."""

    collective: Collective
    dtype: torch.dtype
    calls: int
    is_of_gradients: bool
    num_parts: int
    """The tensor that is moved is this part of the unsharded one: 1, or the shards for the all-reduce over replicas."""

    def num_bytes(self, param: ParamPlan, num_shards: int | None) -> int:
        """Return the bytes of one parameter in all these calls."""
        if self.is_of_gradients and param.dtypes.wire is None:
            return 0  # frozen
        return self.calls * padded_numel(param, num_shards) // self.num_parts * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that one rank holds for a parameter; what autograd and the optimizer keep is not counted."""

    storage: int
    """Its shard as it is stored: ceil(d0 / ranks) rows x the rest x the bytes of the storage dtype."""
    gathered: int
    """The gathered copy while there is one: ranks x ceil(d0 / ranks) rows x the rest x bytes of the gather dtype."""
    gradient: int
    """Its gradient shard at the optimizer step, of the size of the stored shard; and at stages 0 and 1 with
    accumulation, until the reduction, the unsharded sum: elements x the bytes of the accumulation dtype. 0 if
    frozen."""


def padded_numel(param: ParamPlan, num_shards: int | None) -> int:
    """Return the elements of a parameter when FSDP2 has padded dimension 0; without, if `num_shards` is None."""
    if num_shards is None:
        return param.numel
    rows, *rest = param.shape
    return -(-rows // num_shards) * num_shards * math.prod(rest)


def group_collectives(group: GroupPlan, policy: Policy, ranks: Ranks, schedule: Schedule) -> Iterator[GroupCollective]:
    """Yield what a group calls in one optimizer step.

    A parameter that one rank holds whole is neither gathered nor scattered. The all-reduce over replicas runs wherever
    the mesh has that axis, also over one rank; where the ranks are not known, it is left out but at stage 0.
    """
    num_shards = ranks.shards(policy)
    gathers, reductions = schedule.gathers.get(group.name, 0), schedule.reductions.get(group.name, 0)
    sums_here = policy.reduce_accumulate_dtype == "fp32" and group.wire != torch.float32
    if num_shards != 1 and gathers:
        yield GroupCollective(
            collective="all_gather", dtype=group.gather, calls=gathers, is_of_gradients=False, num_parts=1
        )
    if num_shards != 1 and reductions:
        yield GroupCollective(
            collective="all_to_all" if sums_here else "reduce_scatter",
            dtype=group.wire,
            calls=reductions,
            is_of_gradients=True,
            num_parts=1,
        )
    has_replicas = policy.stage == 0 or (ranks.num_replicas is not None and num_shards is not None)
    if has_replicas and reductions:
        yield GroupCollective(
            collective="all_reduce",
            dtype=replica_dtype(group, policy, ranks),
            calls=reductions,
            is_of_gradients=True,
            num_parts=num_shards or 1,
        )


def replica_dtype(group: GroupPlan, policy: Policy, ranks: Ranks) -> torch.dtype:
    """Return the dtype of the all-reduce over replicas: what the reduction inside a replica leaves."""
    overflows = group.wire == torch.float16 and ranks.num_replicas != 1
    return torch.float32 if policy.reduce_accumulate_dtype == "fp32" or overflows else group.wire


def dtypes_on(dtypes: ParamDtypes, group: GroupPlan, policy: Policy, ranks: Ranks) -> ParamDtypes:
    """Return a parameter's dtypes on these ranks."""
    return dtypes if dtypes.wire is None else replace(dtypes, wire=wire_on(group, policy, ranks))


def wire_on(group: GroupPlan, policy: Policy, ranks: Ranks) -> torch.dtype:
    """Return the wire of a group's gradients on these ranks: where nothing is sharded, the all-reduce over replicas."""
    is_whole = ranks.shards(policy) == 1 and ranks.num_replicas is not None
    return replica_dtype(group, policy, ranks) if is_whole else group.wire


def plan_traffic(plan: Plan, ranks: Ranks, schedule: Schedule | None = None) -> Traffic:
    """Return calls and bytes of one optimizer step, as `zeroamp.traffic(model)` counts them on every rank."""
    schedule = schedule or step_schedule(plan)
    traffic = Traffic()
    num_shards = ranks.shards(plan.policy)
    for group in plan.groups:
        for call in group_collectives(group, plan.policy, ranks, schedule):
            key = TrafficKey(call.collective, call.dtype, group.name)
            traffic.calls[key] += call.calls
            traffic.num_bytes[key] += sum(call.num_bytes(param, num_shards) for param in group.params)
    key = TrafficKey("all_reduce", torch.float64, STEP)
    traffic.calls[key] += 1
    # The mean loss, the sum of squares and, with recovery, the number of ranks that failed.
    traffic.num_bytes[key] += (2 + plan.policy.recovery) * torch.float64.itemsize
    return traffic


def param_memory(param: ParamPlan, policy: Policy, num_shards: int) -> Memory:
    """Return what one rank holds for a parameter. See `Memory` for the formulas."""
    padded = padded_numel(param, num_shards)
    storage = padded // num_shards * param.dtypes.storage.itemsize
    accumulates = policy.stage < 2 and policy.gradient_accumulation_steps > 1
    unsharded = param.numel * unsharded_accumulation(policy).itemsize if accumulates else 0
    return Memory(
        storage=storage,
        gathered=padded * param.dtypes.gather.itemsize,
        gradient=storage + unsharded if param.dtypes.wire is not None else 0,
    )
