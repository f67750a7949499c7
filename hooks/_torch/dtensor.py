"""The private names of DTensor.

`TrainStep.step` reads these attributes for each parameter, between the step's all-reduce and the update. Reading an
attribute is faster than `to_local`, which takes as long as a kernel launch.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

_local_tensor = attrgetter("_local_tensor")
_spec = attrgetter("_spec")


def local_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the local shards of DTensors. They share the DTensors' memory. Autograd does not record the access."""
    return map(_local_tensor, tensors)


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local shard of each DTensor (see `local_tensors`), and other tensors unchanged."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def without_wrapper(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory: the local part of a DTensor, what the result of a collective waits for."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of a class run their ops on another tensor: see `without_wrapper`."""
    return issubclass(kind, DTensor | AsyncCollectiveTensor)


def layouts(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the spec of each DTensor: its mesh, placements and shape."""
    return map(_spec, tensors)


def split_dim(placement: Any) -> int | None:
    """Return the dimension that a placement shards; None for Replicate and Partial.

    FSDP2's `_StridedShard` counts too. It is not a subclass of `Shard`.
    """
    dim: int | None = getattr(placement, "dim", None)
    return dim


def is_strided(placement: Any) -> bool:
    """Return whether a placement is FSDP2's `_StridedShard`: a later axis of the mesh shards the same dimension."""
    return hasattr(placement, "split_factor")


def num_axes(tensor: torch.Tensor | None) -> int:
    """Return the number of axes of the mesh that a tensor is distributed over; 0 for a plain tensor.

    A sharded parameter has one or two axes of FSDP2, and one more with tensor or expert parallelism. With these, the
    unsharded parameter is also a DTensor, over that one axis.
    """
    return tensor.device_mesh.ndim if isinstance(tensor, DTensor) else 0
