"""Which part of a whole tensor a rank's shard is, for code that saves, loads or reads whole tensors."""

import math

from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dtensor import is_strided, split_dim
from zeroamp.planning.mesh import local_part


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices, one per dimension, that select this rank's shard from the whole tensor.

    Each axis shards a remaining length d in parts of ceil(d / ranks); the last parts may be shorter or empty. If tensor
    parallelism and FSDP2 shard the same dimension, tensor parallelism comes first.
    """
    starts, lengths = [0] * tensor.dim(), list(tensor.shape)
    for axis in sorted(range(tensor.device_mesh.ndim), key=lambda axis: is_strided(tensor.placements[axis])):
        if (dim := split_dim(tensor.placements[axis])) is not None:
            part = math.ceil(lengths[dim] / tensor.device_mesh.size(axis))
            start = min(part * tensor.device_mesh.get_local_rank(axis), lengths[dim])
            starts[dim], lengths[dim] = starts[dim] + start, min(part, lengths[dim] - start)
    if (found := tuple(local_part(tensor.detach()).shape)) != tuple(lengths):
        raise AssertionError(f"expected a shard of shape {lengths} by {tensor.placements}, got {found}")
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
