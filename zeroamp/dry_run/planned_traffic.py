"""Computes the traffic of one optimizer step, from a `Plan` and numbers of ranks.

Bytes are those of the unsharded tensor, as `Traffic` counts them. So the planned calls and bytes per collective, dtype
and group are equal to those that `zeroamp.traffic(model)` counts in one step.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroamp.dry_run.fsdp_replay import Schedule, step_schedule
from zeroamp.hooks.collectives.traffic import STEP, Collective, ReduceOp, Traffic, TrafficKey
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.groups import PARAMETERS_PER_NUMBER, GroupPlan, ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import padded_numel
from zeroamp.policies.extensions import extensions_of

_REPLICATED_BYTES = 2 * torch.float64.itemsize
"""Bytes of a 0-D parameter in the step's all-reduce: its gradient, and whether there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCollective:
    """A collective that a group issues one or several times in an optimizer step."""

    collective: Collective
    dtype: torch.dtype
    calls: int
    op: ReduceOp = dist.ReduceOp.SUM
    """The op of a reduction. SUM for an all-gather or an all-to-all."""
    num_parts: int = 1
    """Each call moves 1 / num_parts of the unsharded tensor. Above 1 for the all-reduce of a shard over replicas."""
    is_in_last_only: bool = False
    """Whether the call runs in the last micro-batch only."""

    @property
    def is_of_gradients(self) -> bool:
        """Whether the collective moves gradients. An all-gather moves parameters."""
        return self.collective != "all_gather"

    def num_bytes(self, param: ParamPlan, num_shards: int | None) -> int:
        """Return the bytes that these calls move of one parameter."""
        if self.is_of_gradients and not param.is_trainable:
            return 0
        dtype = self.dtype if self.is_of_gradients else param.dtypes.param
        return self.calls * padded_numel(param, num_shards) // self.num_parts * dtype.itemsize


def group_collectives(
    group: GroupPlan, plan: Plan, ranks: Ranks, *, all_gathers: int = 1, reductions: int = 1, last_reductions: int = 1
) -> Iterator[GroupCollective]:
    """Yield the collectives of a group for these numbers of calls. `reductions` includes `last_reductions`."""
    ranks = ranks.of(is_expert=group.is_expert)
    dtypes, num_shards = group_dtypes(group.key, plan.policy, ranks), ranks.shards(plan.policy)
    if dtypes.all_gathers and all_gathers:
        yield GroupCollective(collective="all_gather", dtype=group.all_gather_dtype, calls=all_gathers)
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
    """Yield the collectives of a group in one optimizer step."""
    return group_collectives(
        group,
        plan,
        ranks,
        all_gathers=schedule.all_gathers.get(group.name, 0),
        reductions=schedule.reductions.get(group.name, 0),
        last_reductions=schedule.last_reductions.get(group.name, 0),
    )


def plan_traffic(plan: Plan, ranks: Ranks) -> Traffic:
    """Return the calls and bytes of one optimizer step, as `zeroamp.traffic(model)` counts them on every rank."""
    schedule, traffic = step_schedule(plan), Traffic()
    for group in plan.groups:
        num_shards = ranks.of(is_expert=group.is_expert).shards(plan.policy)
        for call in step_collectives(group, plan, ranks, schedule):
            key = TrafficKey(call.collective, call.dtype, group.name)
            traffic.calls[key] += call.calls
            traffic.num_bytes[key] += sum(call.num_bytes(param, num_shards) for param in group.params)
    for extension in extensions_of(plan.policy):
        extension.add_traffic(plan, ranks, traffic)
    key = TrafficKey("all_reduce", torch.float64, STEP)
    traffic.calls[key] += 1
    # Several ranks compare a hash: one number.
    has_tensor = ranks.num_tensor > 1  # two numbers compare the gradients of the tensor axis' copies
    num_numbers = _num_statistics(plan) + (has_tensor or not ranks.is_one) + 2 * has_tensor
    traffic.num_bytes[key] += num_numbers * torch.float64.itemsize
    return traffic


def bytes_per_step(plan: Plan, ranks: Ranks) -> dict[str, tuple[int, int]]:
    """Return parameter -> the bytes that its all-gathers and its reductions move in one optimizer step."""
    schedule = step_schedule(plan)
    moved: dict[str, tuple[int, int]] = {}
    for group in plan.all_groups:
        num_shards = ranks.of(is_expert=group.is_expert).shards(plan.policy)
        calls = list(step_collectives(group, plan, ranks, schedule))
        for param in group.params:
            gathered = sum(call.num_bytes(param, num_shards) for call in calls if not call.is_of_gradients)
            reduced = sum(call.num_bytes(param, num_shards) for call in calls if call.is_of_gradients)
            moved[param.fqn] = gathered, reduced + (_REPLICATED_BYTES if param.group_key.is_replicated else 0)
    return moved


def _num_statistics(plan: Plan) -> int:
    """Return how many fp64 numbers `TrainStep` sums over ranks in an optimizer step, without those of callbacks.

    These are the mean loss, the sum of squares, the counts of ranks that used each sharded parameter, and the gradients
    of 0-D parameters.
    """
    num_sharded = sum(len(group.params) for group in plan.groups)
    num_replicated = 0 if plan.replicated is None else len(plan.replicated.params)
    return 2 + math.ceil(num_sharded / PARAMETERS_PER_NUMBER) + 2 * num_replicated
