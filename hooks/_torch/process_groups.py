"""The number of process groups that a rank is in, from which torch makes the names of groups.

`new_group(use_local_synchronization=True)`, which only the members call, names a group by its ranks and by the number
of groups that the caller is in. If the members are in different numbers of groups, because the program made some for a
part of the ranks, each waits under a name of its own until the timeout.

Checked on torch 2.13.0; `tests/hooks/_torch/test_private_names.py` fails when groups are no longer named so.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world


def equalise_numbers_of_groups(mesh: DeviceMesh) -> None:
    """Let all ranks of a mesh be in equally many process groups, before they make groups of a part of them.

    A collective call: one all-reduce of an integer per axis. A rank that is in fewer groups than others makes groups of
    itself alone, which connect to nobody.
    """
    most = torch.tensor(len(_world.pg_names), dtype=torch.int64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    for _ in range(int(most) - len(_world.pg_names)):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
