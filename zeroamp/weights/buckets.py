"""All-gathers the weights of a wrapped model in buckets.

[Note: Buckets]
The shards of a bucket are cast, and their all-gathers started, while the bucket before is used. So at most two buckets,
and the cast shards of one, exist beside the shards. transformers computes some published tensors from several of the
model, all of one layer: then the weights of a layer are in one bucket.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from zeroamp.hooks.collectives.collective_calls import peer_lost
from zeroamp.planning.mesh import device_of, sharded_like
from zeroamp.policies.errors import PeerError
from zeroamp.weights.model_weights import Weight

Named = tuple[str, Weight]
_LAYER = re.compile(r"(.*?\.\d+)\.")


@torch.no_grad()
def whole_weights(
    call: str,
    named: Iterable[Named],
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    *,
    by_layer: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield buckets of whole weights by name: see [Note: Buckets]. All ranks of `mesh` iterate to the end.

    Clear a bucket when it is used: the next but one is started when the generator resumes.

    Raises:
        PeerError: another rank does not take part. It names `call`.
    """
    started: dict[str, torch.Tensor] = {}
    with naming_lost_ranks(call):
        for bucket in _buckets(named, dtype, bucket_bytes, by_layer):
            whole = {name: _wait(started.pop(name)) for name in list(started)}
            started = {name: _start(weight, mesh, weight.dtype_in(dtype)) for name, weight in bucket}
            if whole:
                yield whole
        yield {name: _wait(started.pop(name)) for name in list(started)}


@contextmanager
def naming_lost_ranks(call: str) -> Iterator[None]:
    """Turn an error of the backend, by which a collective ended, into a PeerError that names `call`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not isinstance(peer_lost(error, None), PeerError):
            raise
        raise PeerError(
            f"{call} failed on rank {dist.get_rank()}: {str(error).strip()}. Another rank has ended, or did not call "
            f"{call}, which all ranks must call. Read the output of the other ranks, and restart from the last "
            "checkpoint."
        ) from error


def _buckets(
    named: Iterable[Named], dtype: torch.dtype | None, bucket_bytes: int, by_layer: bool
) -> Iterator[Sequence[Named]]:
    bucket: list[Named] = []
    num_bytes, last = 0, ""
    for name, weight in named:
        layer = found[1] if by_layer and (found := _LAYER.match(name)) else name
        size = weight.tensor.numel() * weight.dtype_in(dtype).itemsize
        if bucket and layer != last and num_bytes + size > bucket_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, weight))
        num_bytes, last = num_bytes + size, layer
    yield bucket


def _start(weight: Weight, mesh: DeviceMesh, dtype: torch.dtype) -> torch.Tensor:
    """Start the all-gather of a weight. A weight that is not sharded is this rank's own.

    The shard is cast first, which moves fewer bytes. Rounding is per element, so the bits are the same.

    With gloo each all-gather ends here. If weights sharded along dimension 0 and along others are in flight together,
    torch 2.13 damages the heap (benchmarks/records/2026-11-29_async-redistribute_2-core-cpu).
    """
    device = device_of(mesh)
    local = weight.local.to(device, dtype)
    if not isinstance(weight.tensor, DTensor):
        return local
    sharded = sharded_like(local, weight.tensor)
    whole = [Replicate()] * sharded.device_mesh.ndim
    return sharded.redistribute(placements=whole, async_op=device.type != "cpu").to_local()


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor: `to_local` returns one that waits for its all-gather when an op reads it."""
    waiting = getattr(tensor, "wait", None)
    return tensor if waiting is None else waiting()


def one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the items of a dict and remove them, so that the caller decides how long each tensor lives."""
    while tensors:
        name = next(iter(tensors))
        yield name, tensors.pop(name)
