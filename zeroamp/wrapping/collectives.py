"""Installs zeroamp's collectives into the FSDP2 groups of a model, one set per typed group."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks.collectives.all_gather import CountingAllGather
from zeroamp.hooks.collectives.reduce_scatter import ReceiveBuffers, WireReduceScatter
from zeroamp.hooks.collectives.traffic import ReduceOp
from zeroamp.planning.groups import GroupPlan
from zeroamp.planning.mesh import replicate_size, shard_size
from zeroamp.policies.accumulation import unsharded_accumulation
from zeroamp.policies.policy import Policy
from zeroamp.wrapping.state import WrapState


def attach_collectives(module: FSDPModule, group: GroupPlan, state: WrapState, buffers: ReceiveBuffers) -> None:
    """Give `module`'s own FSDP2 group its wire dtype, its sum, its counters, the log of its calls and its ranges.

    Through FSDP2's public setters. The all-reduce over replicas stays FSDP2's own, in the dtype that the reduce-scatter
    leaves: fp32, or a native bf16 wire's. It is only counted and logged, after the fact, and named.
    """
    policy, mesh, traffic, listeners = state.plan.policy, state.mesh, state.traffic, state.listeners
    module.set_custom_all_gather(
        CountingAllGather(group_name=group.name, traffic=traffic, listeners=listeners, ranges=state.ranges)
    )
    reduction = WireReduceScatter(
        wire_dtype=group.wire,
        accumulate=policy.reduce_accumulate_dtype,
        world_size=shard_size(mesh),
        is_replicated=replicate_size(mesh) > 1,
        group_name=group.name,
        traffic=traffic,
        listeners=listeners,
        buffers=buffers,
        ranges=state.ranges,
    )
    module.set_custom_reduce_scatter(reduction)
    if mesh.ndim == 2:  # FSDP2 runs the all-reduce over an axis of one rank too
        replicas, op = mesh.get_group(0), reduction_op(policy, mesh)

        def count(reduced: torch.Tensor) -> None:
            reduction.end_all_reduce()
            traffic.count("all_reduce", reduced, group.name)
            for listener in listeners:
                listener.on_collective("all_reduce", reduced, group.name, replicas, op)

        module.set_all_reduce_hook(count)


def reduction_op(policy: Policy, mesh: DeviceMesh) -> ReduceOp:
    """Return the op of FSDP2's reductions: it sums and divides itself where it accumulates in float16."""
    averages = mesh.size() > 1 and unsharded_accumulation(policy) != torch.float16
    return dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
