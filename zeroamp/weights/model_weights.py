"""Finds the parameters and persistent buffers of a wrapped model, and their names in files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import CheckpointError
from zeroamp.wrapping.state import reshard

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Parts of FQNs that torch.compile and torch's checkpoint_wrapper insert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter or persistent buffer, with its names."""

    names: tuple[str, ...]
    """All names in the model: a tied parameter has several."""
    tensor: torch.Tensor
    """The parameter or buffer itself. A parameter is a sharded DTensor, unless FSDP2 does not shard it."""
    is_parameter: bool
    written_names: tuple[str, ...]
    """Those of `names` under which an export writes the tensor: see `find_weights`."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, or the whole tensor if it is not sharded."""
        return local_part(self.tensor.detach())


def find_weights(root: nn.Module) -> list[Weight]:
    """Return all parameters and persistent buffers of a wrapped model, in its order. Reshards the model.

    An export writes a tied parameter once, under its first name. A transformers model lists the names that
    `from_pretrained` ties to another name (`all_tied_weights_keys`). Of such a model, a parameter is written under each
    name that is not listed, because `from_pretrained` would not find it otherwise. A shared buffer is written under
    each of its names.

    Raises:
        CheckpointError: the model's state_dict() holds something other than tensors.
    """
    reshard(root.modules())
    # The live objects, not detached: tied parameters are found by identity.
    state = live_state(root)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    weights: list[Weight | int] = []  # int: the id of a parameter
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
    """Return the name in files: `key` without the parts that torch.compile and checkpoint_wrapper insert."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def computed_buffers(root: nn.Module) -> Iterator[str]:
    """Yield the last parts of the names of non-persistent buffers, which the model computes itself."""
    stored = {file_name(key) for key in root.state_dict()}
    for name, _ in root.named_buffers(remove_duplicate=False):
        if file_name(name) not in stored:
            yield name.rpartition(".")[2]


def live_state(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict(keep_vars=True)`: the parameters and buffers themselves.

    Entries that bitsandbytes adds for packed weights that are not sharded ("weight.absmax", for example) are left out.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    packed = {name for name, value in state.items() if hasattr(value, "quant_state")}
    if not packed:
        return state
    around = {name: (name.rpartition(".")[0], name.rpartition(".quant_state.")[0]) for name in state}
    return {name: value for name, value in state.items() if packed.isdisjoint(around[name])}
