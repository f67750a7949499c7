"""Installs zeroamp's collectives into the FSDP2 groups of a model, one set per typed group."""

from torch.distributed.fsdp import FSDPModule

from zeroamp.groups import GroupPlan
from zeroamp.hooks import CountingAllGather, ReceiveBuffers, WireReduceScatter
from zeroamp.mesh import replicate_size, shard_size
from zeroamp.state import WrapState


def attach_collectives(module: FSDPModule, group: GroupPlan, state: WrapState, buffers: ReceiveBuffers) -> None:
    """Give `module`'s own FSDP2 group its wire dtype, its sum, its counters and its names in traces.

    Through FSDP2's public setters. The all-reduce over replicas stays FSDP2's own, in the dtype that the reduce-scatter
    leaves: fp32, or a native bf16 wire's. It is only counted and named.
    """
    mesh = state.mesh
    module.set_custom_all_gather(CountingAllGather(group_name=group.name, traffic=state.traffic, ranges=state.ranges))
    reduction = WireReduceScatter(
        wire_dtype=group.wire,
        accumulate=state.plan.policy.reduce_accumulate_dtype,
        world_size=shard_size(mesh),
        is_replicated=replicate_size(mesh) > 1,
        group_name=group.name,
        traffic=state.traffic,
        buffers=buffers,
        ranges=state.ranges,
    )
    module.set_custom_reduce_scatter(reduction)
    if mesh.ndim == 2:  # FSDP2 runs the all-reduce over an axis of one rank too
        module.set_all_reduce_hook(reduction.after_all_reduce)
