"""`load_hf`: loads safetensors files into a wrapped model. Each rank reads only its own slices."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.tensor_shards import local_slices
from zeroamp.weights.files import NUM_NAMES, stored_tensors, tensors_of_file
from zeroamp.weights.layouts import Part, parts_of_model
from zeroamp.weights.model_weights import Weight, computed_buffers, find_weights
from zeroamp.wrapping.state import wrap_state

_OTHER_LAYOUT = (
    "If the architecture's files have another layout than the model, load it with transformers' from_pretrained "
    "before wrap_model instead."
)


def load_hf(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load the safetensors files in `folder` into a wrapped model. All ranks call it.

    Every rank reads its own part of each parameter, and all of each buffer. So no rank ever holds the whole of a model
    that was wrapped on the meta device. Values are cast to the dtype of the model's parameters: bf16 files fill fp32
    parameters. A tied parameter may have any of its names in the files. Buffers that are not in the model's
    `state_dict()` (rotary frequencies) keep their values. If files contain them, they are skipped.

    The files of a transformers model may have the layout in which the model is published, such as one matrix per
    expert. transformers' own rules are then applied, on each rank to one whole tensor of the model at a time.

    Args:
        model: a model that `wrap_model` returned.
        folder: a folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it lists.

    Raises:
        CheckpointError: on all ranks. With the model unchanged: there are no such files, a file is a link out of the
            folder (links into a hub's cache are followed), or names or shapes differ from the model's. With some
            tensors loaded: a file cannot be read to its end.
        WrapError: the model is not wrapped.
    """
    fill_from_files(model, folder)


class OtherNames(NamedTuple):
    """Names of tensors that only the model has, or only the files have."""

    missing: list[str]
    """Tensors of the model that no file has."""
    unexpected: list[str]
    """Tensors of the files that the model does not have."""


def fill_from_files(model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True) -> OtherNames:
    """Load files as `load_hf` does. Return the names that differ; with `strict`, raise CheckpointError for them."""
    state = wrap_state(model)
    wanted: dict[str, Weight] = {}
    parts: dict[str, Part] = {}

    def check(stack: ExitStack) -> OtherNames:
        weights = find_weights(state.root)
        stored = stored_tensors(Path(folder).absolute(), stack)
        shapes = {name: tuple(weight.tensor.shape) for weight in weights for name in weight.names}
        direct: dict[str, Part] = {name: each for name, each in stored.items() if shapes.get(name) == each.shape}
        if direct.keys() == stored.keys():
            parts.update(direct)
        else:
            parts.update(parts_of_model(state.root, stored, shapes) | direct)
        missing = []
        for weight in weights:
            if (name := next((name for name in weight.names if name in parts), None)) is not None:
                wanted[name] = weight
            else:
                missing.append(weight.written_names[0])
        computed = set(computed_buffers(state.root))
        unexpected = [name for name in parts if name not in shapes and name.rpartition(".")[2] not in computed]
        return OtherNames(missing, unexpected)

    return _fill(check, wanted, parts, state.axes.whole, folder, strict=strict)


def fill_from_file(file: Path, weights_of: Callable[[], Mapping[str, Weight]], mesh: DeviceMesh) -> None:
    """Load some weights of a wrapped model from one safetensors file. All ranks call it, and each reads its own part.

    Args:
        file: a file that contains the tensors of `weights_of`, and no others.
        weights_of: returns the weights by their names in the file.
        mesh: the mesh of all ranks of the model.

    Raises:
        CheckpointError: on all ranks, if `weights_of` raises it, or as `load_hf`.
    """
    wanted: dict[str, Weight] = {}
    parts: dict[str, Part] = {}

    def check(stack: ExitStack) -> OtherNames:
        wanted.update(weights_of())
        parts.update(tensors_of_file(file, stack))
        return OtherNames(sorted(wanted.keys() - parts.keys()), sorted(parts.keys() - wanted.keys()))

    _fill(check, wanted, parts, mesh, file, strict=True)


def _fill(
    check: Callable[[ExitStack], OtherNames],
    wanted: Mapping[str, Weight],
    parts: Mapping[str, Part],
    mesh: DeviceMesh,
    path: str | os.PathLike[str],
    *,
    strict: bool,
) -> OtherNames:
    """Call `check`, which finds the weights and opens the files, compare names and shapes, and copy the values."""

    def checked(stack: ExitStack) -> OtherNames:
        others = check(stack)
        problems = [("are missing", others.missing), ("are not in the model", others.unexpected)] if strict else []
        shapes = [
            f"{name} is {parts[name].shape} instead of {tuple(weight.tensor.shape)}"
            for name, weight in wanted.items()
            if name in parts and parts[name].shape != tuple(weight.tensor.shape)
        ]
        problems.append(("have another shape", shapes))
        texts = [f"{len(names)} {what} ({some_of(names, NUM_NAMES)})" for what, names in problems if names]
        if texts:
            found = " and ".join(texts)
            raise CheckpointError(f"{path} must have the tensors of the model, but {found}. {_OTHER_LAYOUT}")
        return others

    def copy_values() -> None:
        for name, weight in wanted.items():
            own = local_slices(weight.tensor) if isinstance(weight.tensor, DTensor) else None
            weight.local.copy_(parts[name].read(own))

    with torch.no_grad(), ExitStack() as stack:
        ranks = RankGroup.for_saving(mesh)
        others = ranks.run(lambda: checked(stack))[ranks.rank]
        ranks.run(copy_values)
    return others
