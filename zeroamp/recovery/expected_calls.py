"""Predicts the collectives of an optimizer step: the plan's schedule, with process groups and sizes."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.planning.fsdp_replay import evaluation_schedule, step_schedule
from zeroamp.planning.groups import GroupPlan
from zeroamp.planning.mesh import ranks_of
from zeroamp.planning.plan import Plan
from zeroamp.planning.run_order import run_order
from zeroamp.planning.schedule import Kind, Schedule
from zeroamp.planning.traffic import GroupCollective, step_collectives
from zeroamp.recovery.call_log import Call


def expected_calls_of_step(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> list[Call] | None:
    """Return the calls from one optimizer step to the next, or None if they cannot be predicted.

    The model must run its modules in the order of `run_order`. Calls cannot be predicted with a secondary partition or
    with separate reductions, since FSDP2 makes their process groups. Nor can they if the order of reductions depends on
    when a module uses parameters of its own beside those of its children, or on several group holders of the root.
    """
    if plan.policy.hpz_partition_size > 1 or plan.policy.separate_reduce_scatter_group:
        return None
    at_root = [group for group in plan.groups if group.unit == "" and group.kind != "unit"]
    if sum(group.is_trainable for group in at_root) > 1:
        return None
    if plan.run != run_order(model, plan.units, plan.merged, plan.own_units.lookups, owned_by_leaves=True):
        return None
    return _expected(step_schedule(plan), plan, mesh)


def expected_calls_of_evaluation(plan: Plan, mesh: DeviceMesh) -> list[Call]:
    """Return the calls of one forward without gradients that begins with all parameters sharded."""
    return _expected(evaluation_schedule(plan), plan, mesh)


def _expected(schedule: Schedule, plan: Plan, mesh: DeviceMesh) -> list[Call]:
    groups = {group.name: group for group in plan.groups}
    kinds = {name: list(step_collectives(group, plan, ranks_of(mesh), schedule)) for name, group in groups.items()}
    return [call for kind, name in schedule.order for call in _calls(kind, groups[name], kinds[name], plan, mesh)]


def _calls(
    kind: Kind, group: GroupPlan, collectives: list[GroupCollective], plan: Plan, mesh: DeviceMesh
) -> Iterator[Call]:
    num_shards = ranks_of(mesh).shards(plan.policy)
    for collective in collectives:
        if collective.is_of_gradients != (kind != "all_gather"):
            continue
        if collective.is_in_last_only and kind != "last_reduction":
            continue
        num_bytes = sum(collective.num_bytes(param, num_shards) for param in group.params)
        yield Call(
            collective.collective,
            group.name,
            mesh.get_group(0 if collective.collective == "all_reduce" else mesh.ndim - 1),
            collective.dtype,
            num_bytes // collective.calls // collective.dtype.itemsize,
            collective.op,
        )
