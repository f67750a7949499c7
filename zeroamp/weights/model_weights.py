"""Finds the parameters and persistent buffers of a wrapped model, and their names in files."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import CheckpointError
from zeroamp.wrapping.state import reshard

_WRAPPERS = {"_orig_mod": "torch._dynamo.", "_checkpoint_wrapped_module": "torch.distributed.algorithms."}
"""Parts of FQNs that torch.compile and torch's checkpoint_wrapper insert -> where the classes of these wrappers are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter or persistent buffer, with its names."""

    names: tuple[str, ...]
    """All names in the model: a tied parameter has several."""
    tensor: torch.Tensor
    """The parameter or buffer itself. A parameter is a sharded DTensor, unless FSDP2 does not shard it."""
    written_names: tuple[str, ...]
    """Those of `names` under which an export writes the tensor: see `find_weights`."""

    @property
    def is_parameter(self) -> bool:
        """Whether this is a parameter, not a buffer."""
        return isinstance(self.tensor, nn.Parameter)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, or the whole tensor if it is not sharded."""
        return local_part(self.tensor.detach())

    def dtype_in(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of this weight in an export as `dtype`. Buffers and integers keep their own, as for None."""
        is_cast = dtype is not None and self.is_parameter and self.tensor.is_floating_point()
        return dtype if is_cast else self.tensor.dtype  # type: ignore[return-value]


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
    found: dict[int | str, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in live_state(root).items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{name} of the model's state must be a tensor, but is a {type(tensor).__name__}: safetensors files "
                "hold tensors only. Leave it out of the state_dict()."
            )
        # Tied parameters are one object.
        found.setdefault(id(tensor) if isinstance(tensor, nn.Parameter) else name, (tensor, []))[1].append(name)
    tied = getattr(root, "all_tied_weights_keys", None)  # transformers': {name: the name it is tied to}
    weights = []
    for tensor, names in found.values():
        written = names[:1] if tied is None else [name for name in names if name not in tied] or names[:1]
        weights.append(Weight(names=tuple(names), tensor=tensor, written_names=tuple(written)))
    return weights


def file_name(key: str) -> str:
    """Return the name in files: `key` without the parts that torch.compile and checkpoint_wrapper insert."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def live_state(model: nn.Module) -> dict[str, Any]:
    """Return the values of `model.state_dict(keep_vars=True)`, the parameters and buffers themselves, by `file_name`.

    Entries that bitsandbytes adds for packed weights that are not sharded ("weight.absmax", for example) are left out.

    Raises:
        CheckpointError: two entries could have the same name in files.
    """
    _refuse_names(model)
    state = {file_name(key): value for key, value in model.state_dict(keep_vars=True).items()}
    packed = {name for name, value in state.items() if hasattr(value, "quant_state")}
    around = {name: (name.rpartition(".")[0], name.rpartition(".quant_state.")[0]) for name in state}
    return {name: value for name, value in state.items() if packed.isdisjoint(around[name])}


def _refuse_names(model: nn.Module) -> None:
    """Raise CheckpointError for names that `file_name` would leave out, although no wrapper has inserted them."""
    for fqn, module in model.named_modules():
        for name, home in _WRAPPERS.items():
            is_own = any(cls.__module__.startswith(home) for cls in type(module).__mro__)
            if not is_own and name in (*module._modules, *module._parameters, *module._buffers):
                raise CheckpointError(
                    f"{f'{fqn}.{name}' if fqn else name} cannot be saved or loaded: wrappers of torch insert {name!r}, "
                    "which is left out of names in files. Give the module another name."
                )
