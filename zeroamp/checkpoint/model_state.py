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


def state_by_name(root: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return parameters and persistent buffers, without copies, and extra states by name. A shared one has one name.

    Raises:
        CheckpointError: a tensor is neither a parameter nor a buffer, so it could not be loaded.
    """
    live = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    others: dict[str, Any] = {}
    for name, value in live_state(root).items():
        if id(value) in live:
            tensors.setdefault(id(value), (name, value))
        elif isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA_STATE:
            raise CheckpointError(
                f"{name} must be a parameter or a buffer, but is a tensor that a module made for its state_dict(). "
                "Register it as a buffer, or use get_extra_state()."
            )
        else:
            others[name] = value
    return dict(tensors.values()), others


def frozen_names(root: nn.Module) -> list[str]:
    """Return the names of the parameters with `requires_grad` False."""
    tensors, _ = state_by_name(root)
    return [name for name, value in tensors.items() if isinstance(value, nn.Parameter) and not value.requires_grad]


def model_tensors(root: nn.Module, excluded: Container[str]) -> dict[str, torch.Tensor]:
    """Return the model's tensors except those named in `excluded`: by name in the checkpoint, detached, not copied.

    Raises as `state_by_name`.
    """
    tensors, _ = state_by_name(root)
    return {MODEL + name: value.detach() for name, value in tensors.items() if name not in excluded}


def load_extra_states(root: nn.Module, saved: dict[str, Any]) -> None:
    """Pass each saved extra state to its module's `set_extra_state`."""
    keys = {file_name(key): key for key in root.state_dict(keep_vars=True)}
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
    ours |= dict.fromkeys(state_by_name(root)[1], "an extra state")
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
