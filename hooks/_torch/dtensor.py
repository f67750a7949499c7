"""The private names of DTensor and of DeviceMesh, checked on torch 2.11.0, 2.13.0 and 2.15.0.

Reading an attribute of a DTensor is faster than `to_local`, which is an autograd function.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_parts(values: Iterable[Any]) -> list[Any]:
    """Return the local shard of each DTensor, in its memory. Return other values unchanged."""
    return [value._local_tensor if isinstance(value, DTensor) else value for value in values]


def without_wrapper(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory: the local part of a DTensor, what the result of a collective waits for."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


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


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `mesh` was sliced or flattened from; `mesh` itself if it was made directly."""
    return mesh._get_root_mesh()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of one axis with all ranks of a named mesh. The first call makes a process group, on all ranks."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the axes of `meshes`, slices of one mesh, in this order. Makes no process group."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))
