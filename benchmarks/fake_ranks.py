"""A process group of many ranks in one process: collectives return at once and move nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Run inside as rank 0 of `world_size`, with torch's backend "fake". Results of collectives are meaningless."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
