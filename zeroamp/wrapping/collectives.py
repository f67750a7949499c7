"""Installs zeroamp's collectives into the FSDP2 groups of a model, one set per typed group."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import divide_factor
from zeroamp.hooks.collectives.all_gather import GroupAllGather
from zeroamp.hooks.collectives.reduce_scatter import GroupReduceScatter, ReceiveBuffers
from zeroamp.hooks.collectives.traffic import IssuedCollective, notify
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.groups import GroupPlan
from zeroamp.planning.mesh import ranks_of, replicate_size, shard_size
from zeroamp.wrapping.state import WrapState


def attach_collectives(module: FSDPModule, group: GroupPlan, state: WrapState, buffers: ReceiveBuffers) -> None:
    """Give `module`'s own FSDP2 group the dtypes that were planned for it, the state's listeners, and its ranges.

    Through FSDP2's public setters. The all-reduce over replicas stays FSDP2's own, in the dtype of the reduce-scatter's
    output. Listeners hear of it after it was issued.
    """
    mesh, listeners = state.mesh, state.listeners
    dtypes = group_dtypes(group.key, state.plan.policy, ranks_of(mesh))
    module.set_custom_all_gather(GroupAllGather(group_name=group.name, listeners=listeners, ranges=state.ranges))
    reduction = GroupReduceScatter(
        communication_dtype=dtypes.communication,
        reduce_dtype=dtypes.reduce,
        collective=dtypes.reduction,
        op=dtypes.reduction_op,
        divide_factor=partial(divide_factor, module),
        world_size=shard_size(mesh),
        is_replicated=replicate_size(mesh) > 1,
        group_name=group.name,
        listeners=listeners,
        buffers=buffers,
        shares_buffers=group.unit not in state.plan.own_units,
        ranges=state.ranges,
    )
    module.set_custom_reduce_scatter(reduction)
    if mesh.ndim == 2 and state.plan.policy.stage >= 2 and dtypes.replica_once:
        state.all_reduced_once.append(module)
    if state.plan.policy.reduce == "sum":
        module.set_gradient_divide_factor(1.0)
    if mesh.ndim == 2:  # FSDP2 runs the all-reduce over an axis of one rank too
        replicas = mesh.get_group(0)

        def all_reduced(reduced: torch.Tensor) -> None:
            reduction.end_all_reduce()
            op = dtypes.replica_op if divide_factor(module) is None else dist.ReduceOp.SUM
            notify(listeners, IssuedCollective("all_reduce", reduced, group.name, replicas, op))

        module.set_all_reduce_hook(all_reduced)
