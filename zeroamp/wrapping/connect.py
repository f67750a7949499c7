"""Makes NCCL connect the ranks while a model is wrapped, instead of in the first backward.

[Note: When NCCL connects]
NCCL connects ranks, and takes memory for that, at the first collective of a kind on a process group. It takes the
memory from the driver, not from torch's allocator. An all-to-all takes the most: buffers for each other rank of the
node, 3.3 GB on 8 x H100 (https://github.com/NVIDIA/nccl/issues/1685). In the middle of the first backward torch's
allocator may have taken that memory already. Then NCCL raises an error that is not an OutOfMemoryError, and the process
group is unusable. So each kind of collective runs once, with one element per rank, on each process group on which
training runs that kind. The first send to a rank connects all channels to that rank, even if the send is small (NCCL,
`src/enqueue.cc`).

For larger calls NCCL may choose other algorithms with buffers of their own (NVLS). These buffers are not allocated.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.hooks._torch.fsdp import all_gather, reduce_scatter
from zeroamp.hooks._torch.mesh_groups import partition_groups, reduction_groups
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import device_of, ranks_of, replicate_size, shard_size
from zeroamp.wrapping.state import WrapState

Kind = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]


def connect_ranks(model: nn.Module, state: WrapState) -> None:
    """Run each kind of collective of the parameter groups once, if their backend is NCCL. All ranks call this.

    With another backend nothing runs. The process groups of two levels have connected already: see
    `zeroamp.wrapping.nodes`.
    """
    mesh = state.mesh
    if is_nccl(mesh.get_group(mesh.ndim - 1), mesh.device_type):
        for kind, group in collectives_of(model, state):
            _run(kind, group, device_of(mesh))


def is_nccl(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether a process group uses NCCL for tensors of a device type."""
    return f"{device_type}:nccl" in dist.get_backend_config(group).split(",")


def collectives_of(model: nn.Module, state: WrapState) -> Iterator[tuple[Kind, dist.ProcessGroup]]:
    """Yield (kind, process group) of the parameter groups' collectives in one level, each once.

    The order is the same on all ranks. Collectives in two levels are left out.
    """
    mesh, policy, nodes = state.mesh, state.plan.policy, state.nodes
    shards, ranks = mesh.ndim - 1, ranks_of(state.mesh)
    dtypes = [group_dtypes(group.key, policy, ranks) for group in state.plan.groups]
    if shard_size(mesh) > 1:
        if shards not in nodes.gathers:
            yield "all_gather", mesh.get_group(shards)
        for partition in partition_groups(model):
            yield "all_gather", partition
        if shards not in nodes.reductions:
            for kind in sorted({each.reduction for each in dtypes if each.reduction is not None}):
                for group in reduction_groups(model):
                    yield kind, group
    if replicate_size(mesh) > 1 and 0 not in nodes.reductions:
        if any(each.replica is not None and each.sums_in_tree_order for each in dtypes):
            yield "all_to_all", mesh.get_group(0)
            yield "all_gather", mesh.get_group(0)
        else:
            yield "all_reduce", mesh.get_group(0)


def _run(kind: Kind, group: dist.ProcessGroup, device: torch.device) -> None:
    whole, part = torch.zeros(group.size(), device=device), torch.zeros(1, device=device)
    if kind == "all_gather":
        all_gather(whole, part, group, async_op=False)
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    elif kind == "reduce_scatter":
        reduce_scatter(part, whole, group, dist.ReduceOp.SUM)
    else:
        dist.all_reduce(part, group=group)
