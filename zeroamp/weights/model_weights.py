"""The parameters and persistent buffers of a wrapped model, under the names that they have in files."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from zeroamp.planning.mesh import local_part
from zeroamp.planning.parameter_uses import live_state
from zeroamp.policies.errors import CheckpointError
from zeroamp.wrapping.state import reshard

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Parts of names that torch.compile and torch's checkpoint_wrapper put in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter, or a buffer that is stored."""

    names: tuple[str, ...]
    """All its names in the model: a tied parameter has several."""
    tensor: torch.Tensor
    """The parameter or buffer itself; a parameter is a sharded DTensor, unless it has no elements."""
    is_parameter: bool
    written_names: tuple[str, ...]
    """Those of `names` under which it is written; see `find_weights`."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, or the whole tensor if it is not sharded."""
        return local_part(self.tensor.detach())


def find_weights(root: nn.Module) -> list[Weight]:
    """Return all parameters and persistent buffers of a wrapped model, in its order, parameters as shards.

    A tied parameter is written once, under its first name. A transformers model lists the names that `from_pretrained`
    ties to another one (`all_tied_weights_keys`); there a parameter is written under each name that is not listed,
    because `from_pretrained` would not find it otherwise. A shared buffer is written under every one of its names.

    Raises:
        CheckpointError: the model's state_dict() holds something other than tensors.
    """
    reshard(root.modules())
    # The live objects: tied parameters are found by the identity of the object.
    state = live_state(root)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    weights: list[Weight | int] = []  # int: the parameter of this identity
    for key, tensor in state.items():
        name = file_name(key)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{name} of the model's state must be a tensor, but is a {type(tensor).__name__}: safetensors files "
                "hold tensors only. Leave it out of the state_dict()."
            )
        if not isinstance(tensor, nn.Parameter):
            weights.append(Weight(names=(name,), tensor=tensor, is_parameter=False, written_names=(name,)))
            continue
        if id(tensor) not in names:
            weights.append(id(tensor))
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [
        weight if isinstance(weight, Weight) else _parameter(root, names[weight], tensors[weight]) for weight in weights
    ]


def _parameter(root: nn.Module, names: list[str], tensor: torch.Tensor) -> Weight:
    tied = getattr(root, "all_tied_weights_keys", None)  # transformers': {name: the name it is tied to}
    written = names[:1] if tied is None else [name for name in names if name not in tied] or names[:1]
    return Weight(names=tuple(names), tensor=tensor, is_parameter=True, written_names=tuple(written))


def file_name(key: str) -> str:
    """Return the name in files: `key` without the parts that torch.compile and checkpoint_wrapper put in."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def computed_buffers(root: nn.Module) -> Iterator[str]:
    """Yield the last parts of the names of non-persistent buffers, which the model computes itself."""
    stored = {file_name(key) for key in root.state_dict()}
    for name, _ in root.named_buffers(remove_duplicate=False):
        if file_name(name) not in stored:
            yield name.rpartition(".")[2]


class ShardRange(NamedTuple):
    """This rank's shard of a tensor: the indices from `start` on, `length` of them, of dimension `dim`."""

    dim: int
    start: int
    length: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """What the whole tensor is indexed with to get the shard."""
        return (*(slice(None),) * self.dim, slice(self.start, self.start + self.length))


def shard_range(tensor: DTensor) -> ShardRange:
    """Return the part of a DTensor that this rank holds.

    FSDP2 shards one dimension of length d in parts of ceil(d / ranks), the last ones shorter or empty.
    """
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            length = tensor.shape[placement.dim]
            part = math.ceil(length / tensor.device_mesh.size(axis))
            start = min(part * tensor.device_mesh.get_local_rank(axis), length)
            found = ShardRange(placement.dim, start, min(part, length - start))
            local = local_part(tensor.detach()).shape
            if local[found.dim] != found.length:
                raise AssertionError(f"expected {found} by {placement}, got a shard of shape {tuple(local)}")
            return found
    return ShardRange(0, 0, tensor.shape[0])
