"""The private names of DTensor: reads of one attribute, where `to_local` would take as long as a kernel's launch.

A step's Python reads them for each parameter, between the step's all-reduce and the update.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_local_tensor = attrgetter("_local_tensor")
_spec = attrgetter("_spec")


def local_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the shards of DTensors, in the same memory, outside of autograd."""
    return map(_local_tensor, tensors)


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the shards of DTensors, in the same memory, outside of autograd; of other tensors all."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def layouts(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield mesh, placements and shape of DTensors as one object: two DTensors of the same object have the same."""
    return map(_spec, tensors)
