"""Gives all ranks equal numbers of process groups, because torch names new groups by that number.

Only the members call `new_group(use_local_synchronization=True)`. It names a group by its ranks and by the number of
groups that the caller is in. That number differs between members if the program made groups for some of them only. The
members then use different names, and wait for each other until the timeout.

Checked on torch 2.13.0; `tests/hooks/_torch/test_private_names.py` fails when groups are no longer named so.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world


def equalise_numbers_of_groups(mesh: DeviceMesh) -> None:
    """Make groups until all ranks of a mesh are in equally many. Call before making groups of some of the ranks.

    All ranks must call this: it runs one all-reduce of an integer per axis. A rank that is in fewer groups than others
    makes groups of itself alone, which open no connections.
    """
    most = torch.tensor(len(_world.pg_names), dtype=torch.int64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    for _ in range(int(most) - len(_world.pg_names)):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Make this process the first of so many ranks, by torch's backend "fake", whose collectives move nothing.

    Models can be distributed over a mesh of these ranks on the meta device. There must be no process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
