"""Installs zeroamp's all-gather and reduction into the FSDP2 parameter groups of a model."""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import divide_factor, leave_replicas_alone
from zeroamp.hooks.collectives.all_gather import GroupAllGather
from zeroamp.hooks.collectives.gradient_reduction import GroupReduceScatter, variants_over_ranks
from zeroamp.hooks.collectives.traffic import IssuedCollective, notify
from zeroamp.hooks.collectives.tree_sum import Variant, compile_sum, has_kernel
from zeroamp.hooks.group_gradients import GroupGradients
from zeroamp.hooks.tensors import hold_for_current_stream
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.groups import GroupPlan
from zeroamp.planning.mesh import device_of, ranks_of, replicate_size, shard_size
from zeroamp.planning.shard_sizes import local_numel
from zeroamp.policies.errors import WrapError
from zeroamp.wrapping.state import MeshNodes, WrapState


def attach_collectives(module: FSDPModule, group: GroupPlan, state: WrapState, gradients: GroupGradients) -> None:
    """Give `module`'s own FSDP2 group the all-gather and the reduction with the dtypes of the plan.

    Replicas are summed in the order of the tree, in the hook that FSDP2 calls after each reduction. With native sums
    FSDP2 issues the all-reduce over replicas, and the hook only notifies the listeners.

    Args:
        module: a unit's module or a group holder, after `fully_shard`.
        group: the parameter group that it has.
        state: the plan, meshes, listeners and receive buffers.
        gradients: the gradients of the group.
    """
    mesh, listeners = state.axes.fsdp_of(is_expert=group.is_expert), state.listeners
    dtypes = group_dtypes(group.key, state.plan.policy, ranks_of(mesh), sends_sums=False)
    of_sums = group_dtypes(group.key, state.plan.policy, ranks_of(mesh), sends_sums=True)
    nodes = _nodes_of(mesh, state)
    gathers = nodes.by_axis.get(mesh.ndim - 1)
    gather = GroupAllGather(group_name=group.name, nodes=gathers, listeners=listeners)
    module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # its base class is private, and adds nothing
    is_summed_here = mesh.ndim == 2 and dtypes.sums_in_tree_order
    reduction = GroupReduceScatter(
        communication_dtype=dtypes.communication,
        reduce_dtype=dtypes.reduce,
        dtypes_of_sums=(of_sums.communication, of_sums.reduce),
        collective=dtypes.reduction,
        op=dtypes.reduction_op,
        divide_factor=partial(divide_factor, module),
        world_size=shard_size(mesh),
        replicas=mesh.get_group(0) if is_summed_here and replicate_size(mesh) > 1 else None,
        nodes=nodes.by_axis.get(mesh.ndim - 1),
        replica_nodes=nodes.by_axis.get(0) if mesh.ndim == 2 else None,
        divides_outside=dtypes.unsharded_accumulate == torch.float16,
        group_name=group.name,
        listeners=listeners,
        buffers=state.buffers,
        shares_buffers=group.unit not in state.plan.own_units,
    )
    module.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
    gradients.reduction = reduction
    if state.plan.policy.reduce == "sum":
        module.set_gradient_divide_factor(1.0)
    elif mesh is not state.mesh:  # experts get the tokens of all data ranks
        module.set_gradient_divide_factor(state.mesh.size())
    if mesh.ndim == 2 and state.plan.policy.stage >= 2 and dtypes.replica_once:
        state.replica_switches.append(partial(FSDPModule.set_requires_all_reduce, module, recurse=False))
    if is_summed_here:
        if mesh.device_type == "mtia":
            raise WrapError(
                "Sums in fp32 over replicas (HSDP) are not supported on MTIA: FSDP2 divides each reduction there, so "
                'the sums would be divided twice. Set "zeroamp": {"reduce_accumulate_dtype": "native"}, or use no '
                "replicas."
            )
        leave_replicas_alone(module)
        if replicate_size(mesh) > 1:
            _sum_replicas(module, reduction, gradients)
    elif mesh.ndim == 2:  # FSDP2 runs the all-reduce over an axis of one rank too
        replicas = mesh.get_group(0)

        def all_reduced(reduced: torch.Tensor) -> None:
            op = dtypes.replica_op if divide_factor(module) is None else dist.ReduceOp.SUM
            notify(listeners, IssuedCollective("all_reduce", reduced, group.name, replicas, op))

        module.set_all_reduce_hook(all_reduced)


def compile_sums(state: WrapState) -> None:
    """Compile the variants of the kernel that the sums over ranks may need: [Note: Variants of the kernel]."""
    device = device_of(state.mesh)
    if has_kernel(device):
        for variant in dict.fromkeys(each for group in state.plan.groups for each in _variants(group, state)):
            compile_sum(variant, device)


def _variants(group: GroupPlan, state: WrapState) -> Iterator[Variant]:
    """Yield the variants of the kernel for the reductions of a group.

    If some parameters of the group are frozen, a reduction has another size. `multiple` divides all of these sizes.
    """
    mesh = state.axes.fsdp_of(is_expert=group.is_expert)
    dtypes, of_sums = (
        group_dtypes(group.key, state.plan.policy, ranks_of(mesh), sends_sums=sends_sums)
        for sends_sums in (False, True)
    )
    nodes, num_shards = _nodes_of(mesh, state).by_axis, shard_size(mesh)
    if dtypes.reduction == "all_to_all":
        multiple = math.gcd(*(local_numel(param, num_shards) for param in group.params))
        for dtype in dict.fromkeys((dtypes.communication, of_sums.communication)):
            yield from variants_over_ranks(num_shards, dtype, multiple, nodes.get(mesh.ndim - 1))
    if mesh.ndim == 2 and dtypes.sums_in_tree_order and replicate_size(mesh) > 1:
        yield from variants_over_ranks(replicate_size(mesh), torch.float32, nodes=nodes.get(0))


def _nodes_of(mesh: DeviceMesh, state: WrapState) -> MeshNodes:
    return state.nodes if mesh is state.mesh else MeshNodes()


def _sum_replicas(module: FSDPModule, reduction: GroupReduceScatter, gradients: GroupGradients) -> None:
    """Sum over replicas after those reductions of `module`'s own group for which `add_partial_sums` returns True."""

    def complete(reduced: torch.Tensor) -> None:
        # FSDP2 may add `reduced` to `parameter.grad` in this stream, and release it without waiting.
        hold_for_current_stream(reduced)
        if gradients.add_partial_sums(reduced):
            reduction.sum_over_replicas(reduced)

    module.set_all_reduce_hook(complete)
