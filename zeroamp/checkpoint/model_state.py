"""The state of a model in a checkpoint: its tensors by name, and the extra states of its modules.

Names are `model.<fqn>`, without the parts that torch.compile puts in. A parameter or buffer that several modules share
is saved once, under its first name.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.weights.model_weights import live_state

MODEL, CALLBACK = "model.", "callback."
_COMPILED, _EXTRA_STATE = "_orig_mod", "_extra_state"
_NUM_NAMED = 5  # names of one kind in an error


def state_by_name(root: nn.Module) -> dict[str, Any]:
    """Return parameters, persistent buffers and extra states by name, without copies. A shared tensor has one name."""
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for key, value in live_state(root).items():
        if _is_tensor(key, value) and id(value) in seen:
            continue
        seen.add(id(value))
        named[_plain_name(key)] = value
    return named


def _plain_name(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != _COMPILED)


def _is_tensor(key: str, value: object) -> bool:
    """Return whether an entry is a parameter or buffer, and not a tensor that `get_extra_state` returned."""
    return isinstance(value, torch.Tensor) and key.rpartition(".")[2] != _EXTRA_STATE


def frozen_names(root: nn.Module) -> list[str]:
    """Return the names of the parameters with `requires_grad` False."""
    state = state_by_name(root).items()
    return [name for name, value in state if isinstance(value, nn.Parameter) and not value.requires_grad]


def model_tensors(root: nn.Module, excluded: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Return the model's tensors except those named in `excluded`: by name in the checkpoint, detached, not copied.

    Raises:
        CheckpointError: a tensor is neither a parameter nor a buffer, so it could not be loaded.
    """
    live = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    tensors = {name: value for name, value in state_by_name(root).items() if _is_tensor(name, value)}
    for name, value in tensors.items():
        if id(value) not in live:
            raise CheckpointError(
                f"{name} must be a parameter or a buffer, but is a tensor that a module made for its state_dict(). "
                "Register it as a buffer, or use get_extra_state()."
            )
    return {MODEL + name: value.detach() for name, value in tensors.items() if name not in excluded}


def callback_tensors(callbacks: Iterable[object]) -> dict[str, torch.Tensor]:
    """Return the tensors of the callbacks that have a method `tensors`, by name in the checkpoint.

    Raises:
        CheckpointError: two callbacks have tensors of the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    for callback in callbacks:
        named = callback.tensors() if hasattr(callback, "tensors") else {}
        if twice := tensors.keys() & {f"{CALLBACK}{name}" for name in named}:
            name = min(twice).removeprefix(CALLBACK)
            raise CheckpointError(f"Two callbacks have the tensor {name}. Remove one, or give it another decay.")
        tensors |= {f"{CALLBACK}{name}": tensor for name, tensor in named.items()}
    return tensors


def shard_dims(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return FQN -> sharded dimension, of the tensors of a model that are sharded over another dimension than 0."""
    return {
        name.removeprefix(MODEL): placement.dim
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor)
        for placement in tensor.placements
        if isinstance(placement, Shard) and placement.dim > 0
    }


def extra_states(root: nn.Module) -> dict[str, Any]:
    """Return the results of the modules' `get_extra_state`, by name."""
    return {name: value for name, value in state_by_name(root).items() if not _is_tensor(name, value)}


def load_extra_states(root: nn.Module, saved: dict[str, Any]) -> None:
    """Pass each saved extra state to its module's `set_extra_state`."""
    keys = {_plain_name(key): key for key in root.state_dict()}
    root.load_state_dict({keys[name]: value for name, value in saved.items()}, strict=False)


def check_model_fits(
    root: nn.Module, metadata: Metadata, saved_extra: Iterable[str], where: str, excluded: Sequence[str] = ()
) -> None:
    """Raise CheckpointError unless the model has the saved tensors (names, shapes, dtypes) and extra states (names).

    `excluded` are frozen parameters that the save left out. The model must have them, and they must be frozen.
    """
    if trained := sorted(set(excluded) - set(frozen_names(root))):
        raise CheckpointError(
            f"{where} was saved with exclude_frozen_parameters, without {some_of(trained, _NUM_NAMED)}, but in the "
            "model these are trainable or missing. Freeze them as in the save, or load a checkpoint that has them."
        )
    saved = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model_tensors(root, excluded).items()}
    extra, found_extra = set(saved_extra), extra_states(root).keys()
    differences = [
        *named_differences("only in the checkpoint", (saved.keys() - found.keys()) | (extra - found_extra)),
        *named_differences("only in the model", (found.keys() - saved.keys()) | (found_extra - extra)),
        *named_differences(
            "different",
            (
                f"{name} (checkpoint {_form(saved[name])}, model {_form(found[name])})"
                for name in found
                if name in saved and saved[name] != found[name]
            ),
        ),
    ]
    if differences:
        raise CheckpointError(
            f"{where} must have the parameters and buffers of the model, but they differ: {'; '.join(differences)}. "
            "Build the model as it was saved."
        )


def _form(shape_and_dtype: tuple[tuple[int, ...], torch.dtype]) -> str:
    shape, dtype = shape_and_dtype
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def named_differences(what: str, names: Iterable[str]) -> list[str]:
    """Return a list of one text, "what: names", or an empty list if there are no names."""
    found = sorted(name.removeprefix(MODEL) for name in names)
    return [f"{what}: {some_of(found, _NUM_NAMED)}"] if found else []
