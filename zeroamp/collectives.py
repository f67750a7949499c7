"""Installs zeroamp's collectives into the FSDP2 groups of a model, one set per typed group."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from zeroamp.groups import GroupPlan
from zeroamp.hooks import CountingAllGather, ReceiveBuffers, Traffic, WireReduceScatter
from zeroamp.mesh import replicate_size, shard_size
from zeroamp.plan import Plan


def attach_collectives(
    module: FSDPModule, group: GroupPlan, plan: Plan, mesh: DeviceMesh, traffic: Traffic, buffers: ReceiveBuffers
) -> None:
    """Give `module`'s own FSDP2 group its wire dtype, its sum and its counters.

    Through FSDP2's public setters. The all-reduce over replicas stays FSDP2's own, in the dtype that the reduce-scatter
    leaves: fp32, or a native bf16 wire's. It is only counted.
    """
    module.set_custom_all_gather(CountingAllGather(group_name=group.name, traffic=traffic))
    is_replicated = replicate_size(mesh) > 1
    module.set_custom_reduce_scatter(
        WireReduceScatter(
            wire_dtype=group.wire,
            accumulate=plan.policy.reduce_accumulate_dtype,
            world_size=shard_size(mesh),
            is_replicated=is_replicated,
            group_name=group.name,
            traffic=traffic,
            buffers=buffers,
        )
    )
    if mesh.ndim == 2:  # FSDP2 runs the all-reduce over an axis of one rank too

        def count(reduced: torch.Tensor) -> None:
            traffic.count("all_reduce", reduced, group.name)

        module.set_all_reduce_hook(count)
