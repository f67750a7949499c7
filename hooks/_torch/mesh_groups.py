"""The process groups that FSDP2 uses for its collectives, from the meshes of its parameter groups.

Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from zeroamp.hooks._torch.fsdp import groups_of, units_of


def reduction_groups(root: nn.Module) -> list[dist.ProcessGroup]:
    """Return the distinct process groups of the reduce-scatters."""
    infos = [group.mesh_info for group in _groups(root)]
    return _distinct(getattr(i, "reduce_scatter_process_group", None) or i.shard_process_group for i in infos)


def partition_groups(root: nn.Module) -> list[dist.ProcessGroup]:
    """Return the distinct process groups of the secondary partitions (hpZ), over which the backward all-gathers."""
    infos = [(group.mesh_info, group.post_forward_mesh_info) for group in _groups(root)]
    return _distinct(
        after.shard_process_group
        for before, after in infos
        if after is not None and after.shard_mesh_size != before.shard_mesh_size
    )


def _groups(root: nn.Module) -> Iterator[Any]:
    return (group for unit in units_of(root) for group in groups_of(unit._get_fsdp_state()))


def _distinct(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return list({group.group_name: group for group in groups}.values())
