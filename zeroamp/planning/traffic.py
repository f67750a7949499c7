"""What one optimizer step moves between ranks, and what a rank holds: from a `Plan` and the numbers of ranks.

Pure: numbers only. Bytes are in the convention of `Traffic`, those of the unsharded tensor, so that what is planned
here and what `zeroamp.traffic(model)` counts in one step are equal: calls and bytes, per collective, dtype and group.

FSDP2 pads dimension 0 to a multiple of the ranks that shard it. Of a parameter of shape (d0, …) a rank holds
ceil(d0 / ranks) rows, and ranks x ceil(d0 / ranks) rows are moved. Another dimension is divided evenly: see
`zeroamp.planning.shard_dim`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroamp.hooks.collectives.exact_sum import NUM_NUMBERS
from zeroamp.hooks.collectives.traffic import SCALES, STEP, Collective, ReduceOp, Traffic, TrafficKey
from zeroamp.planning.fsdp_replay import step_schedule
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.groups import GroupPlan, ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.schedule import Schedule
from zeroamp.planning.shard_dim import numel_of_shards
from zeroamp.policies.accumulation import unsharded_accumulation
from zeroamp.policies.policy import Policy

PARAMETERS_PER_NUMBER = 3
"""Sharded parameters per fp64 number of the step's all-reduce: it counts the ranks that used each of them."""

REPLICATED_BYTES = 2 * torch.float64.itemsize
"""Bytes of a 0-D parameter in the step's all-reduce: its gradient, and whether there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCollective:
    """One kind of call that a group makes in an optimizer step."""

    collective: Collective
    dtype: torch.dtype
    calls: int
    op: ReduceOp = dist.ReduceOp.SUM
    """Of a reduction; copies are noted as SUM."""
    num_parts: int = 1
    """The tensor that is moved is this part of the unsharded one: 1, or the shards for the all-reduce over replicas."""
    is_in_last_only: bool = False
    """Whether the call runs in the last micro-batch only."""

    @property
    def is_of_gradients(self) -> bool:
        """Whether gradients are moved, not parameters."""
        return self.collective != "all_gather"

    def num_bytes(self, param: ParamPlan, num_shards: int | None) -> int:
        """Return the bytes of one parameter in all these calls."""
        if self.is_of_gradients and not param.is_trainable:
            return 0
        dtype = self.dtype if self.is_of_gradients else param.dtypes.param
        return self.calls * padded_numel(param, num_shards) // self.num_parts * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that one rank holds for a parameter; what autograd and the optimizer keep is not counted."""

    stored: int
    """Its shard as it is stored: ceil(d / ranks) of the sharded dimension x the rest x bytes of the stored dtype."""
    unsharded: int
    """The unsharded parameter while it exists: as many elements as the ranks' shards have x bytes of its dtype."""
    gradient: int
    """Its gradient shard at the optimizer step, of the size of the stored shard; and at stages 0 and 1 with
    accumulation, until the reduction, the unsharded sum: elements x the bytes of the accumulation dtype. 0 if
    frozen."""


def padded_numel(param: ParamPlan, num_shards: int | None) -> int:
    """Return the elements of a parameter when FSDP2 has padded it to the ranks; without, if `num_shards` is None."""
    if num_shards is None:
        return param.numel
    return numel_of_shards(param.shape, param.shard_dim(num_shards), num_shards)


def local_numel(param: ParamPlan, num_shards: int) -> int:
    """Return the elements of a parameter that a rank holds, padding included."""
    is_whole = param.group_key.is_replicated or param.group_key.is_ignored
    return param.numel if is_whole else padded_numel(param, num_shards) // num_shards


def group_collectives(
    group: GroupPlan, plan: Plan, ranks: Ranks, *, all_gathers: int = 1, reductions: int = 1, last_reductions: int = 1
) -> Iterator[GroupCollective]:
    """Yield the collectives of a group for these numbers of runs. `reductions` include `last_reductions`."""
    ranks = ranks.of(is_expert=group.is_expert)
    dtypes, num_shards = group_dtypes(group.key, plan.policy, ranks), ranks.shards(plan.policy)
    if dtypes.all_gathers and all_gathers:
        yield GroupCollective(collective="all_gather", dtype=group.gather_dtype, calls=all_gathers)
    if dtypes.reduction is not None and reductions:
        yield GroupCollective(
            collective=dtypes.reduction, dtype=dtypes.communication, calls=reductions, op=dtypes.reduction_op
        )
    all_reduces = last_reductions if dtypes.replica_once else reductions
    if dtypes.replica is not None and all_reduces:
        yield GroupCollective(
            collective="all_reduce",
            dtype=dtypes.replica,
            calls=all_reduces,
            op=dtypes.replica_op,
            num_parts=num_shards or 1,
            is_in_last_only=dtypes.replica_once,
        )


def step_collectives(group: GroupPlan, plan: Plan, ranks: Ranks, schedule: Schedule) -> Iterator[GroupCollective]:
    """Yield what a group calls in one optimizer step."""
    return group_collectives(
        group,
        plan,
        ranks,
        all_gathers=schedule.all_gathers.get(group.name, 0),
        reductions=schedule.reductions.get(group.name, 0),
        last_reductions=schedule.last_reductions.get(group.name, 0),
    )


def plan_traffic(plan: Plan, ranks: Ranks) -> Traffic:
    """Return calls and bytes of one optimizer step, as `zeroamp.traffic(model)` counts them on every rank."""
    schedule, traffic = step_schedule(plan), Traffic()
    for group in plan.groups:
        num_shards = ranks.of(is_expert=group.is_expert).shards(plan.policy)
        for call in step_collectives(group, plan, ranks, schedule):
            key = TrafficKey(call.collective, call.dtype, group.name)
            traffic.calls[key] += call.calls
            traffic.num_bytes[key] += sum(call.num_bytes(param, num_shards) for param in group.params)
    if num_scales := sum(param.is_float8 for param in plan.params):
        key = TrafficKey("all_reduce", torch.float32, SCALES)
        traffic.calls[key] += 1
        traffic.num_bytes[key] += num_scales * torch.float32.itemsize
    key = TrafficKey("all_reduce", torch.float64, STEP)
    traffic.calls[key] += 1
    # Several ranks compare a hash. With recovery, the number of ranks that failed is sent.
    has_tensor = ranks.num_tensor > 1  # two numbers compare gradients of copies
    num_numbers = num_statistics(plan, ranks) + (has_tensor or not ranks.is_one) + 2 * has_tensor + plan.policy.recovery
    traffic.num_bytes[key] += num_numbers * torch.float64.itemsize
    return traffic


def num_statistics(plan: Plan, ranks: Ranks) -> int:
    """Return how many fp64 numbers `TrainStep` sums over ranks in an optimizer step, without those of callbacks.

    These are the mean loss, the sum of squares, the usage of sharded parameters, and the 0-D parameters' gradients.
    With `zeroamp.reproducible` the first two are exact sums, and 0-D parameters have a gradient per micro-batch of each
    rank.
    """
    policy = plan.policy
    num_sharded = sum(len(group.params) for group in plan.groups)
    num_replicated = 0 if plan.replicated is None else len(plan.replicated.params)
    num_gradients = policy.gradient_accumulation_steps * (ranks.num_ranks or 1) if policy.reproducible else 1
    num_sums = 2 * NUM_NUMBERS if policy.reproducible else 2
    return num_sums + math.ceil(num_sharded / PARAMETERS_PER_NUMBER) + num_replicated * (num_gradients + 1)


def param_memory(param: ParamPlan, policy: Policy, num_shards: int) -> Memory:
    """Return the bytes that one rank holds for a parameter, by the formulas of `Memory`.

    0-D and ignored parameters are whole on each rank, and not unsharded.
    """
    if param.group_key.is_replicated or param.group_key.is_ignored:
        size = param.numel * param.dtypes.stored.itemsize
        return Memory(stored=size, unsharded=0, gradient=size if param.is_trainable else 0)
    padded = padded_numel(param, num_shards)
    stored = padded // num_shards * param.dtypes.stored.itemsize
    accumulates = policy.stage < 2 and policy.gradient_accumulation_steps > 1
    unsharded_sum = param.numel * unsharded_accumulation(policy).itemsize if accumulates else 0
    return Memory(
        stored=stored,
        unsharded=padded * param.dtypes.param.itemsize,
        gradient=stored + unsharded_sum if param.is_trainable else 0,
    )
