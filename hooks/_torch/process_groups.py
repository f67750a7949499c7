"""Gives all ranks equal numbers of process groups, because torch names new groups by that number.

Only the members call `new_group(use_local_synchronization=True)`. torch names the group by its ranks and a number. On
torch 2.11 and 2.13 this is the number of groups that the caller is in. On 2.15 it is the number of calls of `new_group`
that the caller has made as a member, or that all ranks have made. These numbers differ between members if the program
made groups for some of them only. The members then use different names, and wait for each other until the timeout.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; `tests/hooks/_torch/test_private_names.py` fails if torch names groups in
another way.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _hash_ranks_to_str, _world


def number_in_names() -> int:
    """Return the number by which torch would name a group that this rank makes now."""
    if "group_count" in _hash_ranks_to_str.__code__.co_names:
        return int(_world.group_count)
    return len(_world.pg_names)


def equalise_numbers_of_groups(mesh: DeviceMesh) -> None:
    """Make groups until `number_in_names` is equal on all ranks of a mesh. Call before making groups of some ranks.

    All ranks must call this: it runs one all-reduce of an integer per axis. A rank whose number is less than that of
    others makes groups of itself alone, which open no connections.
    """
    equalise_numbers_along(axis_groups(mesh), mesh.device_type)


def axis_groups(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    """Yield the process groups of the axes with several ranks, in the order of the axes.

    Axes of one rank are left out: NCCL would make a communicator for a collective that changes nothing.
    """
    return (mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def equalise_numbers_along(groups: Iterable[dist.ProcessGroup], device_type: str) -> None:
    """Make groups until `number_in_names` is equal on all ranks of a mesh, whose axes have the process groups `groups`.

    All ranks of the mesh must call this. The all-reduces run on the device type.
    """
    most = torch.tensor(number_in_names(), dtype=torch.int64, device=device_type)
    for group in groups:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    for _ in range(int(most) - number_in_names()):
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
