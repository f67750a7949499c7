"""An error of one rank is raised on all: none waits for another that has left."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.policies.errors import CheckpointError


@contextmanager
def raised_together(mesh: DeviceMesh) -> Iterator[None]:
    """Run the body on every rank of `mesh`; where it raises on some, raise on all. One small collective per axis.

    The body has no collectives. A rank where it raised raises its own error.

    Raises:
        CheckpointError: on the other ranks, with the texts of all errors.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    texts: list[str] = [] if error is None else [f"{type(error).__name__} on rank {dist.get_rank()}: {error}"]
    for axis in range(mesh.ndim):
        by_rank: list[list[str]] = [[] for _ in range(mesh.size(axis))]
        dist.all_gather_object(by_rank, texts, group=mesh.get_group(axis))
        texts = [text for rank in by_rank for text in rank]
    if error is not None:
        raise error
    if texts:
        raise CheckpointError("\n".join(texts))
