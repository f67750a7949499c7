"""The state of a model in a checkpoint: its tensors by name, and the extra states of its modules.

Names are `model.<fqn>`, without the parts that torch.compile and checkpoint_wrapper put in. A parameter or buffer that
several modules share is saved once, under its first name.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroamp.checkpoint.manifest import Layout
from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.weights.model_weights import file_name, live_state

MODEL = "model."
_EXTRA_STATE = "_extra_state"
_NUM_NAMED = 5  # names of one kind in an error


def state_by_name(root: nn.Module) -> dict[str, Any]:
    """Return parameters, persistent buffers and extra states by name, without copies. A shared tensor has one name."""
    named: dict[str, Any] = {}
    seen: set[int] = set()
    live = _live(root)
    for key, value in live_state(root).items():
        if id(value) in live and id(value) in seen:
            continue
        seen.add(id(value))
        if (name := file_name(key)) in named:
            raise CheckpointError(
                f"Two parts of the model have the name {name} in a checkpoint, because {key} has a part that "
                "torch.compile or checkpoint_wrapper inserts. Rename the module."
            )
        named[name] = value
    return named


def _live(root: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*root.parameters(), *root.buffers())}


def _is_tensor(key: str, value: object, live: Container[int]) -> bool:
    """Return whether an entry is a tensor that `get_extra_state` did not return. A parameter may have its name too."""
    return isinstance(value, torch.Tensor) and (key.rpartition(".")[2] != _EXTRA_STATE or id(value) in live)


def frozen_names(root: nn.Module) -> list[str]:
    """Return the names of the parameters with `requires_grad` False."""
    state = state_by_name(root).items()
    return [name for name, value in state if isinstance(value, nn.Parameter) and not value.requires_grad]


def model_tensors(root: nn.Module, excluded: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Return the model's tensors except those named in `excluded`: by name in the checkpoint, detached, not copied.

    Raises:
        CheckpointError: a tensor is neither a parameter nor a buffer, so it could not be loaded.
    """
    live = _live(root)
    tensors = {name: value for name, value in state_by_name(root).items() if _is_tensor(name, value, live)}
    for name, value in tensors.items():
        if id(value) not in live:
            raise CheckpointError(
                f"{name} must be a parameter or a buffer, but is a tensor that a module made for its state_dict(). "
                "Register it as a buffer, or use get_extra_state()."
            )
    return {MODEL + name: value.detach() for name, value in tensors.items() if name not in excluded}


def extra_states(root: nn.Module) -> dict[str, Any]:
    """Return the results of the modules' `get_extra_state`, by name."""
    live = _live(root)
    return {name: value for name, value in state_by_name(root).items() if not _is_tensor(name, value, live)}


def load_extra_states(root: nn.Module, saved: dict[str, Any]) -> None:
    """Pass each saved extra state to its module's `set_extra_state`."""
    keys = {file_name(key): key for key in root.state_dict()}
    root.load_state_dict({keys[name]: value for name, value in saved.items()}, strict=False)


def check_model_fits(
    root: nn.Module, layouts: Mapping[str, Layout], own: dict[str, Any], where: str, excluded: Sequence[str]
) -> None:
    """Raise CheckpointError unless the model has the saved tensors (names, shapes, dtypes) and extra states (names).

    `own` has a rank's tensors and extra states. Its shapes count: those of a buffer may differ between ranks.
    `excluded` are frozen parameters that the save left out. The model must have them, and they must be frozen.
    """
    if trained := sorted(set(excluded) - set(frozen_names(root))):
        raise CheckpointError(
            f"{where} was saved with exclude_frozen_parameters, without {some_of(trained, _NUM_NAMED)}, but in the "
            "model these are trainable or missing. Freeze them as in the save, or load a checkpoint that has them."
        )
    saved = {
        name: _form(layout.shape, layout.torch_dtype) for name, layout in layouts.items() if name.startswith(MODEL)
    }
    ours = {name: _form(tensor.shape, tensor.dtype) for name, tensor in model_tensors(root, excluded).items()}
    saved |= {name: _form(tensor.shape, tensor.dtype) for name, tensor in own["tensors"].items()}
    saved |= dict.fromkeys(own["extra_states"], "an extra state")
    ours |= dict.fromkeys(extra_states(root), "an extra state")
    if differing := [name for name in sorted({**saved, **ours}) if saved.get(name) != ours.get(name)]:
        texts = [
            f"{name.removeprefix(MODEL)} (checkpoint: {saved.get(name, 'none')}, model: {ours.get(name, 'none')})"
            for name in differing
        ]
        raise CheckpointError(
            f"{where} must have the parameters and buffers of the model, but they differ: "
            f"{some_of(texts, _NUM_NAMED)}. Build the model as it was saved."
        )


def _form(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
