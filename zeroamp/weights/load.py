"""`load_hf`: loads safetensors files into a wrapped model. Each rank reads only its own slices."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import local_slices
from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.weights.files import OF_SEVERAL, exports_of, stored_tensors
from zeroamp.weights.layouts import Source, parts_of_model
from zeroamp.weights.model_weights import Weight, file_name, find_weights
from zeroamp.wrapping.state import refuse_joined, wrap_state

Found = tuple[Mapping[str, Weight], Mapping[str, Source], set[str | None]]
"""Weights of a model, and tensors of files, by names that should be the same; and `exports_of` the files."""


def load_hf(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load the safetensors files in `folder` into a wrapped model. All ranks call it.

    Every rank reads its own part of each parameter, and all of each buffer. So no rank ever holds the whole of a model
    that was wrapped on the meta device. Values are cast to the dtype of the model's parameters: bf16 files fill fp32
    parameters. A tied parameter may have any of its names in the files. Buffers that are not in the model's
    `state_dict()` (rotary frequencies) keep their values. If files contain them, they are skipped.

    The files of a transformers model may have the layout in which the model is published, such as one matrix per
    expert. transformers' own rules are then applied, on each rank to one whole tensor of the model at a time.

    A part of a pipeline takes the tensors that it has from the files of the whole model.

    Args:
        model: a model that `wrap_model` returned.
        folder: a folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it lists.

    Raises:
        CheckpointError: on all ranks. With the model unchanged: there are no such files, a file is a link out of the
            folder (links into a hub's cache are followed), or names or shapes differ from the model's. With some
            tensors loaded: a file cannot be read to its end.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    refuse_joined(state, "load_hf")

    def find(stack: ExitStack) -> Found:
        weights = find_weights(state.root)
        shapes = {name: tuple(weight.tensor.shape) for weight in weights for name in weight.names}
        stored = stored_tensors(Path(folder).absolute(), stack)
        parts: dict[str, Source] = {name: each for name, each in stored.items() if shapes.get(name) == each.shape}
        if parts.keys() != stored.keys():
            parts = parts_of_model(state.root, stored, shapes) | parts
        wanted: dict[str, Weight] = {}
        for weight in weights:
            own, *others = [name for name in weight.names if name in parts] or weight.written_names[:1]
            wanted[own] = weight
            for name in others:  # a tied parameter
                parts.pop(name, None)
        # Non-persistent buffers: the model computes them itself.
        buffers = {name for name, _ in state.root.named_buffers(remove_duplicate=False)}
        computed = {name.rpartition(".")[2] for name in map(file_name, buffers) if name not in shapes}
        parts = {name: each for name, each in parts.items() if name.rpartition(".")[2] not in computed}
        if state.axes.stages is not None:  # the files have the other parts too
            parts = {name: each for name, each in parts.items() if name in wanted}
        return wanted, parts, exports_of(stored)

    fill_weights(find, state.axes.whole, folder)


def fill_weights(find: Callable[[ExitStack], Found], mesh: DeviceMesh, path: str | os.PathLike[str]) -> None:
    """Fill weights of a wrapped model from tensors of files. All ranks of `mesh` call it, and each reads its own part.

    `find` opens the files in the given `ExitStack`, and returns the weights and the tensors that fill them. If it
    raises, or names or shapes differ, all ranks raise a CheckpointError that names `path`.
    """
    found: list[tuple[Mapping[str, Weight], Mapping[str, Source]]] = []

    def check() -> set[str | None]:
        weights, parts, exports = find(stack)
        problems = {
            "are missing": [name for name in weights if name not in parts],
            "are not in the model": [name for name in parts if name not in weights],
            "have another shape": [
                f"{name} is {parts[name].shape} instead of {tuple(weight.tensor.shape)}"
                for name, weight in weights.items()
                if name in parts and parts[name].shape != tuple(weight.tensor.shape)
            ],
            "have a dtype that the model's cannot hold": [
                f"{name} is {parts[name].dtype} instead of "
                f"{'floating-point' if weight.tensor.is_floating_point() else weight.tensor.dtype}"
                for name, weight in weights.items()
                if name in parts and not _fits(parts[name].dtype, weight.tensor.dtype)
            ],
        }
        texts = [f"{len(names)} {what} ({some_of(names, 5)})" for what, names in problems.items() if names]
        if texts:
            raise CheckpointError(
                f"{path} must have the tensors of the model, but {' and '.join(texts)}. If the architecture's files "
                "have another layout than the model, load it with transformers' from_pretrained before wrap_model."
            )
        found.append((weights, parts))
        return exports

    def copy_values() -> None:
        weights, parts = found[0]
        for name, weight in weights.items():
            own = local_slices(weight.tensor) if isinstance(weight.tensor, DTensor) else None
            weight.local.copy_(parts[name].read(own))

    with torch.no_grad(), ExitStack() as stack:
        ranks = RankGroup.for_saving(mesh, "load_hf")
        if len(set().union(*ranks.run(check))) > 1:
            raise CheckpointError(f"{path} {OF_SEVERAL}")
        ranks.run(copy_values)


def _fits(stored: torch.dtype | None, own: torch.dtype) -> bool:
    """Return whether a tensor of a file may fill a weight: floats fill floats, integers those that can hold them."""
    if stored is None or own.is_floating_point:
        return stored is not None and stored.is_floating_point
    is_wider = not stored.is_floating_point and not own.is_complex and torch.promote_types(stored, own) == own
    return stored == own or is_wider
