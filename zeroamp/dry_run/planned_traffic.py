"""Computes the traffic of one optimizer step, from a `Plan` and numbers of ranks.

Bytes are those of the unsharded tensor, as `Traffic` counts them. So the planned calls and bytes per collective, dtype
and group are equal to those that `zeroamp.traffic(model)` counts in one step.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from zeroamp.dry_run.fsdp_replay import Kind, step_schedule
from zeroamp.hooks.collectives.traffic import STEP, Collective, Traffic, TrafficKey
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.groups import PARAMETERS_PER_NUMBER, GroupPlan, ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import padded_numel
from zeroamp.policies.extensions import extensions_of

_REPLICATED_BYTES = 2 * torch.float64.itemsize
"""Bytes of a 0-D parameter in the step's all-reduce: its gradient, and whether there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupCollective:
    """A collective that a group issues one or several times in an optimizer step."""

    collective: Collective
    dtype: torch.dtype
    calls: int
    num_parts: int = 1
    """Each call moves 1 / num_parts of the unsharded tensor. Above 1 for the all-reduce of a shard over replicas."""

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


def _collectives(
    group: GroupPlan, plan: Plan, ranks: Ranks, counts: Mapping[tuple[Kind, str], int]
) -> Iterator[_GroupCollective]:
    """Yield the collectives of a group in one optimizer step. `counts` are those of the calls of `step_schedule`."""
    dtypes = group_dtypes(group.key, plan.policy, ranks)
    last = counts["last_reduction", group.name]
    reductions = counts["reduction", group.name] + last
    if dtypes.all_gathers and (calls := counts["all_gather", group.name]):
        yield _GroupCollective(collective="all_gather", dtype=group.all_gather_dtype, calls=calls)
    if dtypes.reduction is not None and reductions:
        yield _GroupCollective(collective=dtypes.reduction, dtype=dtypes.communication, calls=reductions)
    if dtypes.replica is not None and (calls := last if dtypes.replica_once else reductions):
        num_parts = ranks.shards(plan.policy) or 1
        yield _GroupCollective(collective="all_reduce", dtype=dtypes.replica, calls=calls, num_parts=num_parts)


def plan_traffic(plan: Plan, ranks: Ranks) -> Traffic:
    """Return the calls and bytes of one optimizer step, as `zeroamp.traffic(model)` counts them on every rank."""
    counts, traffic = Counter(step_schedule(plan)), Traffic()
    for group in plan.groups:
        of_group = ranks.of(is_expert=group.is_expert)
        for call in _collectives(group, plan, of_group, counts):
            key = TrafficKey(call.collective, call.dtype, group.name)
            traffic.calls[key] += call.calls
            traffic.num_bytes[key] += sum(call.num_bytes(param, of_group.shards(plan.policy)) for param in group.params)
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
    counts = Counter(step_schedule(plan))
    moved: dict[str, tuple[int, int]] = {}
    for group in plan.all_groups:
        of_group = ranks.of(is_expert=group.is_expert)
        num_shards = of_group.shards(plan.policy)
        calls = list(_collectives(group, plan, of_group, counts))
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
