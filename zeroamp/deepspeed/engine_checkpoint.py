"""The engine's checkpoints: DeepSpeed's tags and its file `latest`, with `zeroamp.save_checkpoint` inside.

    FOLDER/latest            the tag of the newest checkpoint
    FOLDER/TAG/zeroamp/      a checkpoint of zeroamp.save_checkpoint

A folder that DeepSpeed wrote is refused: its own converter writes weights that `zeroamp.load_hf` reads.
"""

import os
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import CheckpointError, StepError, describe, some_of
from zeroamp.weights.drafts import replace_durably
from zeroamp.weights.export import gather_weights
from zeroamp.weights.model_weights import find_weights
from zeroamp.weights.untrusted_files import read_regular
from zeroamp.wrapping.refused_calls import replace_method
from zeroamp.wrapping.state import wrap_state

_LATEST = "latest"
_MAX_TAG_BYTES = 4096


def folder_of(value: object, argument: str) -> Path:
    """Return the folder that the engine's call got as `argument`. Raise CheckpointError unless it is a path."""
    if isinstance(value, str | os.PathLike) and os.fspath(value):
        return Path(value)
    remedy = "Pass one such as 'runs/a', or '.' for the working directory."
    raise CheckpointError(describe(f"engine.{argument}", repr(value), "the path of a folder", remedy))


def path_of(folder: Path, tag: str) -> Path:
    """Return where the checkpoint of a tag is. Raise CheckpointError unless the tag is a folder name."""
    if tag in ("", ".", "..", _LATEST) or Path(tag).name != tag:
        raise CheckpointError(describe("tag=", repr(tag), "the name of a folder", "Pass one such as 'global_step100'."))
    return folder / tag / "zeroamp"


def write_latest(folder: Path, tag: str) -> None:
    """Write a tag into the file `latest`."""
    replace_durably(folder / _LATEST, tag.encode(), path_of(folder, tag).parent)


def find(folder: Path, tag: str | None) -> str | None:
    """Return the tag to load: `tag`, or for None the one in `latest`. None if that file does not exist.

    Raises:
        CheckpointError: the tag does not exist, or DeepSpeed wrote it.
    """
    if tag is None:
        try:
            tag = read_regular(folder / _LATEST, _MAX_TAG_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
    path = path_of(folder, tag)
    if not path.parent.is_dir():
        tags = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
        raise CheckpointError(f"{folder} has no checkpoint {tag!r}. Pass one of its tags: {some_of(tags) or 'none'}.")
    if not path.is_dir():
        raise CheckpointError(
            f"{path.parent} was not written by zeroamp. For the weights of a checkpoint of DeepSpeed, run its "
            "`zero_to_fp32.py . OUTPUT --safe_serialization` in its folder, then zeroamp.load_hf(engine.module, "
            "OUTPUT) after initialize(). Optimizer state, step counts and loss scale of DeepSpeed cannot be loaded."
        )
    return tag


def whole_weights(module: nn.Module, dtype: torch.dtype, *, without_frozen: bool) -> dict[str, torch.Tensor]:
    """Return whole weights and buffers on the CPU of the first rank, under all their names. All ranks call it.

    Args:
        module: the wrapped model.
        dtype: floating-point parameters are cast to it.
        without_frozen: whether to leave out frozen parameters.
    """
    weights = [
        weight
        for weight in find_weights(module)
        if not (without_frozen and weight.is_parameter and not weight.tensor.requires_grad)
    ]
    by_name, mesh = {weight.names[0]: weight for weight in weights}, wrap_state(module).axes.whole
    whole = gather_weights("The engine's call for whole weights", by_name, mesh, dtype)
    # A tied parameter has several names, and one copy. Other ranks get nothing.
    return {name: whole[weight.names[0]] for weight in weights for name in weight.names if whole}


def write_weights(path: Path, state_dict: dict[str, torch.Tensor]) -> None:
    """Write weights to a file: by `torch.save`, or as safetensors if its name ends in ".safetensors"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        first = {id(tensor): name for name, tensor in reversed(state_dict.items())}  # a shared tensor once
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items() if first[id(tensor)] == name}, path)
    else:
        torch.save(state_dict, path)


def guard_state_dict(module: nn.Module) -> None:
    """Make a script's `module.state_dict()` return whole tensors at stage 0, and raise if it would return shards.

    Scripts call it on one rank and write the result to a file. With `keep_vars=True`, and inside of the `state_dict`
    of another module, it returns what the wrapped model has, which are shards.
    """
    state = wrap_state(module)
    with state.changes.noting([module]):
        replace_method(module, "state_dict", partial(_whole_or_error, state.plan.policy.stage))


def _whole_or_error(stage: int, state_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(state_dict)
    def checked(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = state_dict(*args, **kwargs)
        is_for_shards = bool(args) or kwargs.get("keep_vars") or kwargs.get("destination") is not None
        if is_for_shards or not any(type(each) is DTensor for each in found.values()):
            return found
        if stage > 0:
            raise StepError(
                "state_dict of the engine's module was called, but the parameters are sharded. Call "
                "engine.module_state_dict() or engine.save_16bit_model(folder) on all ranks, or the module's "
                "state_dict inside zero.GatheredParameters. For the shards, call state_dict(keep_vars=True)."
            )
        return {name: local_part(each) for name, each in found.items()}

    return checked
