"""The weights of a wrapped model by the names they have in files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.wrapping.state import reshard

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Parts of names that torch.compile and torch's checkpoint_wrapper put in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter, or a buffer that is stored."""

    names: tuple[str, ...]
    """All it is known by in the model: several for a tied parameter."""
    tensor: torch.Tensor
    """The parameter or buffer itself; a parameter is a sharded DTensor, unless it has no elements."""
    is_parameter: bool
    written_names: tuple[str, ...]
    """Those of `names` that a file has it under; see `find_weights`."""

    @property
    def local(self) -> torch.Tensor:
        """What of it is on this rank: its shard, or all of it."""
        return local_part(self.tensor.detach())


def find_weights(root: nn.Module) -> list[Weight]:
    """Return all parameters and persistent buffers of a wrapped model, in its order, parameters as shards.

    A tied parameter is in a file once, under its first name. A transformers model says which of its names
    `from_pretrained` ties to another one; a parameter is written under each name of which it says nothing, since
    `from_pretrained` would not find it otherwise. Every name of a shared buffer is a buffer of its own in the file.

    Raises:
        CheckpointError: the model's state holds something that is no tensor.
    """
    reshard(root.modules())
    # The parameters themselves, by whose identity tied ones are known.
    state: dict[str, Any] = root.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    weights: list[Weight | int] = []  # int: the parameter of this identity
    for key, tensor in state.items():
        name = file_name(key)
        if not isinstance(tensor, torch.Tensor):
            found = f"a {type(tensor).__name__} in the model's state"
            raise CheckpointError(
                describe(name, found, "tensors", "safetensors files hold nothing else: leave it out.")
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
    """Return the name of a parameter or buffer in files: without what wraps the modules it is in."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def computed_buffers(root: nn.Module) -> Iterator[str]:
    """Yield the last parts of the names of buffers that are not stored: the model computes them itself."""
    stored = {file_name(key) for key in root.state_dict()}
    for name, _ in root.named_buffers(remove_duplicate=False):
        if file_name(name) not in stored:
            yield name.rpartition(".")[2]
