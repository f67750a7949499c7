"""`load_hf`: loads safetensors files into a wrapped model. Each rank reads only its own slices."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import num_shards_of
from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.tensor_shards import local_slices
from zeroamp.weights.export import overflow, refuse_overflows
from zeroamp.weights.files import INDEX, SINGLE_FILE, read_index, safetensors_torch
from zeroamp.weights.layouts import Part, Stored, parts_of_model
from zeroamp.weights.model_weights import Weight, computed_buffers, find_weights
from zeroamp.weights.untrusted_files import leads_out, open_regular
from zeroamp.wrapping.state import wrap_state

_NUM_NAMES = 5  # names that an error lists at most
_LARGEST = {"F64": torch.finfo(torch.float64).max, "F32": torch.finfo(torch.float32).max,
            "BF16": torch.finfo(torch.bfloat16).max, "F16": torch.finfo(torch.float16).max}  # fmt: skip
"""Safetensors' name of a dtype -> its largest number."""
_KEEP_RANGE = "Build the model in a dtype that has the value, or correct the files."
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
            folder (links into a hub's cache are followed), names or shapes differ from the model's, a tensor has a
            floating-point dtype in only one of model and files, or a finite value would be infinite in the model's
            dtype. With some tensors loaded: a file cannot be read to its end, or a tied parameter has two values.
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
    plan: list[_Item] = []

    def check(files: _Files) -> OtherNames:
        weights = find_weights(state.root)
        stored = files.stored()
        names = {name for weight in weights for name in weight.names}
        parts: dict[str, Part] = dict(stored)
        direct = {name: stored[name].shape for name in names & stored.keys()}
        of_model = {name: tuple(weight.tensor.shape) for weight in weights for name in weight.names}
        if stored.keys() != direct.keys() or any(of_model[name] != shape for name, shape in direct.items()):
            parts = parts_of_model(state.root, stored, names)
            parts |= {name: stored[name] for name, shape in direct.items() if of_model[name] == shape}
        others = _other_names(weights, parts, set(computed_buffers(state.root)))
        if strict:
            _refuse_other_names(others, folder)
        plan.extend(_Item(name, weight, parts[name]) for weight in weights for name in weight.names if name in parts)
        plan.sort(key=lambda item: files.position(item.part))
        _refuse_other_shapes(plan, folder)
        return others

    with torch.no_grad(), ExitStack() as stack:
        files = _Files(Path(folder).absolute(), stack)
        ranks = RankGroup.for_saving(state.axes.whole)
        others = ranks.run(lambda: check(files))[ranks.rank]
        ranks.run(lambda: _refuse_out_of_range(plan))
        ranks.run(lambda: _fill(plan, folder))
    return others


def fill_from_file(file: Path, weights_of: Callable[[], Mapping[str, Weight]], mesh: DeviceMesh) -> None:
    """Load some weights of a wrapped model from one safetensors file. All ranks call it, and each reads its own part.

    Args:
        file: a file that contains the tensors of `weights_of`, and no others.
        weights_of: returns the weights by their names in the file.
        mesh: the mesh of all ranks of the model.

    Raises:
        CheckpointError: on all ranks, if `weights_of` raises it, or as `load_hf`.
    """
    plan: list[_Item] = []

    def check(stack: ExitStack) -> None:
        wanted, opened = weights_of(), stack.enter_context(_open(file))
        if differ := sorted(wanted.keys() ^ set(opened.keys())):
            raise CheckpointError(
                f"{file} must have the tensors of {len(wanted)} weights of the model, but only one of the two has "
                f"{some_of(differ, _NUM_NAMES)}. Build the model that was saved."
            )
        plan.extend(_Item(name, weight, Stored(name=name, open=lambda: opened)) for name, weight in wanted.items())
        _refuse_other_shapes(plan, file)

    with torch.no_grad(), ExitStack() as stack:
        ranks = RankGroup.for_saving(mesh)
        ranks.run(lambda: check(stack))
        ranks.run(lambda: _refuse_out_of_range(plan))
        ranks.run(lambda: _fill(plan, file))


class _Item(NamedTuple):
    """A tensor to read: its name in the model, the weight it fills, and its source."""

    name: str
    weight: Weight
    part: Part


class _Files:
    """The safetensors files of a folder. Opens each file once."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._opened: dict[Path, Any] = {}
        self._place: dict[str, tuple[Path, int]] = {}

    def stored(self) -> dict[str, Stored]:
        """Return the tensors of all files by name.

        Raises:
            CheckpointError: there are no files, or a file cannot be read, or lacks a tensor that the index lists.
        """
        found = _files_by_name(self._folder)
        names: dict[Path, list[str]] = {}
        for name, path in found.items():
            names.setdefault(path, []).append(name)
        for path, listed in names.items():
            held = {name: index for index, name in enumerate(self.open(path).keys())}
            if absent := [name for name in listed if name not in held]:
                raise CheckpointError(
                    f"{path} must have the tensors that {INDEX} lists, but lacks {some_of(absent, _NUM_NAMES)}. "
                    "Get the files again."
                )
            self._place.update((name, (path, held[name])) for name in listed)
        return {name: Stored(name=name, open=partial(self.open, path)) for name, path in found.items()}

    def open(self, path: Path) -> Any:
        """Return an open safetensors file."""
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(_open(path))
        return self._opened[path]

    def position(self, part: Part) -> tuple[Path, int]:
        """Return file and index of a part's first source: parts are read in this order."""
        return min(self._place[source.name] for source in part.sources)


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor in the folder."""
    index, single = folder / INDEX, folder / SINGLE_FILE
    if index.exists():
        return {name: folder / file for name, file in read_index(index).items()}
    if single.exists():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    needed = f"{folder} must be a folder with {SINGLE_FILE}, or with {INDEX} and its files"
    if pickle := next(folder.glob("pytorch_model*.bin*"), None):
        raise CheckpointError(
            f"{needed}, but has {pickle.name}. A pickle may run any code: convert it once, with transformers' "
            "from_pretrained and save_pretrained."
        )
    raise CheckpointError(
        f"{needed}, but {'has neither' if folder.is_dir() else 'is not a folder'}. Pass the folder of the weights. "
        "Download those of a hub first (huggingface_hub.snapshot_download)."
    )


def _open(path: Path) -> Any:
    safetensors_torch()
    from safetensors import SafetensorError, safe_open  # an optional dependency, which training does not need

    if leads_out(path, *_hub_blobs(path)):
        raise CheckpointError(
            f"{path} must be a file in its folder, but is a link to {path.resolve()}. Copy the file into the "
            "folder, or pass the folder that has it."
        )
    try:
        open_regular(path).close()
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file ({type(error).__name__}: {error}). Get the file again."
        ) from error


def _hub_blobs(path: Path) -> list[Path]:
    """Return [REPO/blobs], the files of a hub's cache, if `path` is a link REPO/snapshots/REVISION/NAME; else []."""
    snapshots = path.parent.resolve().parent
    return [snapshots.parent / "blobs"] if snapshots.name == "snapshots" else []


def _other_names(weights: list[Weight], parts: Mapping[str, Part], computed: set[str]) -> OtherNames:
    missing = [weight.written_names[0] for weight in weights if not any(name in parts for name in weight.names)]
    known = {name for weight in weights for name in weight.names}
    unexpected = [name for name in parts if name not in known and name.rpartition(".")[2] not in computed]
    return OtherNames(missing, unexpected)


def _refuse_other_names(others: OtherNames, folder: str | os.PathLike[str]) -> None:
    problems = (("are missing", others.missing), ("are not in the model", others.unexpected))
    texts = [f"{len(names)} {kind} ({some_of(names, _NUM_NAMES)})" for kind, names in problems if names]
    if texts:
        found = " and ".join(texts)
        raise CheckpointError(f"{folder} must have the tensors of the model, but {found}. {_OTHER_LAYOUT}")


def _refuse_other_shapes(plan: list[_Item], folder: str | os.PathLike[str]) -> None:
    shapes, kinds = [], []
    for name, weight, part in plan:
        found, wanted = part.shape, tuple(weight.tensor.shape)
        if found != wanted:
            shapes.append(f"{name} is {found} instead of {wanted}")
        if part.dtype_name.startswith(("F", "BF")) != weight.tensor.is_floating_point():
            kinds.append(f"{name} is {part.dtype_name} instead of {weight.tensor.dtype}")
    for problems, what in ((shapes, "shapes"), (kinds, "kinds of dtype (floating-point or not)")):
        if problems:
            found_text = some_of(problems, _NUM_NAMES)
            raise CheckpointError(f"{folder} must have the {what} of the model, but {found_text}. {_OTHER_LAYOUT}")


def _refuse_out_of_range(plan: list[_Item]) -> None:
    """Raise CheckpointError if a finite value would be infinite in the model's dtype. Reads only wider dtypes."""
    for name, weight, part in plan:
        dtype = weight.tensor.dtype
        if _LARGEST.get(part.dtype_name, 0.0) > _largest(dtype):
            largest = overflow(_read(part, weight.tensor), dtype)
            refuse_overflows({} if largest is None else {name: largest}, dtype, _KEEP_RANGE)


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else math.inf


def _fill(plan: list[_Item], folder: str | os.PathLike[str]) -> None:
    filled: dict[int, str] = {}
    for name, weight, part in plan:
        local, values = weight.local, _read(part, weight.tensor)
        first = filled.setdefault(id(weight), name)
        if first == name:
            local.copy_(values)
        elif not torch.equal(local, values.to(local)):
            raise CheckpointError(
                f"{first} and {name} are one tied parameter, but have different values in {folder}. Untie "
                "the parameter in the model (transformers: tie_word_embeddings=False), or correct the files."
            )


def _read(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor (all of it if it is not sharded), in the file's dtype, on the CPU."""
    if isinstance(tensor, DTensor) and num_shards_of(tensor) > 1:
        return part.read(local_slices(tensor))
    return part.read()
