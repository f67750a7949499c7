"""Computes the traffic of one optimizer step, from a `Plan` and numbers of ranks.

Bytes are those of the unsharded tensor, as `Traffic` counts them. So the planned calls and bytes per collective, dtype
and group are equal to those that `zeroamp.traffic(model)` counts in one step. Neither has the collectives of a tensor
axis: which gradients are partial is known in a backward only.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zeroamp.dry_run.fsdp_replay import step_schedule
from zeroamp.hooks.collectives.traffic import STEP, Traffic, TrafficKey
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import padded_numel
from zeroamp.policies.extensions import extensions_of, of_class
from zeroamp.wrapping.extensions import WrapExtension

_NUMBERS_PER_REPLICATED = 2
"""Numbers of a 0-D parameter in the step's all-reduce: its gradient, and whether there is one."""


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls of one collective of a group in an optimizer step."""

    key: TrafficKey
    number: int
    num_bytes: dict[str, int]
    """Parameter -> the bytes that these calls move of it."""


def _calls(plan: Plan, ranks: Ranks) -> Iterator[_Calls]:
    """Yield the collectives of all groups."""
    counts = Counter(step_schedule(plan))
    for group in plan.groups:
        of_group = ranks.of(is_expert=group.is_expert)
        dtypes, num_shards = group_dtypes(group.key, plan.policy, of_group), of_group.shards(plan.policy)
        padded = {param.fqn: padded_numel(param, num_shards) for param in group.params}
        trained = {param.fqn: padded[param.fqn] for param in group.params if param.is_trainable}
        last = counts["last_reduction", group.name]
        reductions = counts["reduction", group.name] + last
        if dtypes.all_gathers and (number := counts["all_gather", group.name]):
            moved = {param.fqn: number * padded[param.fqn] * param.dtypes.param.itemsize for param in group.params}
            yield _Calls(TrafficKey("all_gather", group.all_gather_dtype, group.name), number, moved)
        if dtypes.reduction is not None and reductions:
            moved = {fqn: reductions * numel * dtypes.communication.itemsize for fqn, numel in trained.items()}
            yield _Calls(TrafficKey(dtypes.reduction, dtypes.communication, group.name), reductions, moved)
        if dtypes.replica is not None and (number := last if dtypes.replica_once else reductions):
            parts = num_shards or 1  # the shard alone is reduced over replicas
            moved = {fqn: number * numel // parts * dtypes.replica.itemsize for fqn, numel in trained.items()}
            yield _Calls(TrafficKey("all_reduce", dtypes.replica, group.name), number, moved)


def plan_traffic(plan: Plan, ranks: Ranks) -> Traffic:
    """Return the calls and bytes of one optimizer step, as `zeroamp.traffic(model)` counts them on every rank."""
    traffic = Traffic()
    for calls in _calls(plan, ranks):
        traffic.calls[calls.key] += calls.number
        traffic.num_bytes[calls.key] += sum(calls.num_bytes.values())
    for extension in of_class(extensions_of(plan.policy), WrapExtension):
        extension.add_traffic(plan, ranks, traffic)
    # The step's all-reduce: the mean loss, the sum of squares, and how many ranks used each sharded parameter.
    num_numbers = 2 + sum(len(group.params) for group in plan.groups)
    if plan.replicated is not None:
        num_numbers += len(plan.replicated.params) * _NUMBERS_PER_REPLICATED
    has_tensor = ranks.num_tensor > 1  # two numbers compare the gradients of the tensor axis' copies
    num_numbers += (has_tensor or not ranks.is_one) + 2 * has_tensor  # several ranks compare a hash: one number
    key = TrafficKey("all_reduce", torch.float64, STEP)
    traffic.calls[key] += 1
    traffic.num_bytes[key] += num_numbers * torch.float64.itemsize
    return traffic


def bytes_per_step(plan: Plan, ranks: Ranks) -> dict[str, tuple[int, int]]:
    """Return parameter -> the bytes that its all-gathers and its reductions move in one optimizer step."""
    gathered, reduced = Counter[str](), Counter[str]()
    for calls in _calls(plan, ranks):
        (gathered if calls.key.collective == "all_gather" else reduced).update(calls.num_bytes)
    if plan.replicated is not None:
        num_bytes = _NUMBERS_PER_REPLICATED * torch.float64.itemsize
        reduced.update({param.fqn: num_bytes for param in plan.replicated.params})
    return {param.fqn: (gathered[param.fqn], reduced[param.fqn]) for param in plan.params}
