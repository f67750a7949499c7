"""Makes a process group of fake ranks. Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


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
