"""`load_hf`: safetensors files into a wrapped model, each rank reading its own slices."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import shard_size
from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.policies.files import leads_out, open_regular
from zeroamp.weights.export import overflow, refuse_overflows
from zeroamp.weights.files import INDEX, SINGLE_FILE, read_index, safetensors_torch
from zeroamp.weights.model_weights import Weight, computed_buffers, find_weights, first_row
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import wrap_state

_NUM_NAMES = 5  # names in an error, of thousands
_LARGEST = {"F64": torch.finfo(torch.float64).max, "F32": torch.finfo(torch.float32).max,
            "BF16": torch.finfo(torch.bfloat16).max, "F16": torch.finfo(torch.float16).max}  # fmt: skip
"""Safetensors' name of a dtype -> its largest number."""
_KEEP_RANGE = "Build the model in a dtype that has the value, or correct the files."
_OTHER_LAYOUT = (
    "Where the architecture's files have another layout than its model, load it with transformers' from_pretrained "
    "before wrap_model instead."
)


def load_hf(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Fill a wrapped model from the safetensors in `folder`. All ranks call it.

    Every rank reads its own rows of each parameter, and all of each buffer, so no rank ever holds the whole of a model
    that was wrapped on the meta device. Values are cast to the dtype of the model's parameters: files of bf16 fill fp32
    parameters. A tied parameter may have any of its names in the files. Buffers that are not in the model's
    `state_dict()` (rotary frequencies) keep their values, and are skipped in files that have them.

    Args:
        model: from `wrap_model`.
        folder: with `model.safetensors`, or `model.safetensors.index.json` and the files it names.

    Raises:
        CheckpointError: on all ranks. The model is unchanged if there are no such files, a file is a link out of the
            folder (links into a hub's cache are followed), names, shapes or kinds of number are not the model's (the
            first few are named, the others counted), or a finite value would be infinite in the model's dtype. The
            model is filled in part if a file cannot be read to its end, or a tied parameter has two values.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    weights: list[Weight] = []
    plan: dict[Path, list[tuple[str, Weight]]] = {}

    def check() -> None:
        files = _files_by_name(Path(folder).absolute())
        weights.extend(find_weights(state.root))
        _refuse_other_names(weights, files, set(computed_buffers(state.root)), folder)
        for weight in weights:
            for name in (name for name in weight.names if name in files):
                plan.setdefault(files[name], []).append((name, weight))
        _refuse_other_shapes(plan, folder)

    with torch.no_grad():
        ranks = RankGroup.for_saving(state.mesh)
        ranks.run(check)
        ranks.run(lambda: _refuse_out_of_range(plan, state.mesh))
        ranks.run(lambda: _fill(plan, state.mesh))


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
        f"{needed}, but {'has neither' if folder.is_dir() else 'is no folder'}. Name the folder of the weights; from a "
        "hub, download it first (huggingface_hub.snapshot_download)."
    )


def _open(path: Path) -> Any:
    safetensors_torch()
    from safetensors import SafetensorError, safe_open  # an extra: training needs none

    if leads_out(path, *_hub_blobs(path)):
        raise CheckpointError(
            f"{path} must be a file of its folder, but is a link to {path.resolve()}. Copy the file into the "
            "folder, or name the folder that has it."
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


def _refuse_other_names(
    weights: list[Weight], files: dict[str, Path], computed: set[str], folder: str | os.PathLike[str]
) -> None:
    missing = [weight.written_names[0] for weight in weights if not any(name in files for name in weight.names)]
    known = {name for weight in weights for name in weight.names}
    unexpected = [name for name in files if name not in known and name.rpartition(".")[2] not in computed]
    problems = (("are missing", missing), ("are not in the model", unexpected))
    texts = [f"{len(names)} {kind} ({some_of(names, _NUM_NAMES)})" for kind, names in problems if names]
    if texts:
        found = " and ".join(texts)
        raise CheckpointError(f"{folder} must have the tensors of the model, but {found}. {_OTHER_LAYOUT}")


def _refuse_other_shapes(plan: dict[Path, list[tuple[str, Weight]]], folder: str | os.PathLike[str]) -> None:
    shapes, kinds = [], []
    for path, items in plan.items():
        with _open(path) as file:
            held = set(file.keys())
            if absent := [name for name, _ in items if name not in held]:
                raise CheckpointError(
                    f"{path} must have the tensors that {INDEX} lists, but lacks {some_of(absent, _NUM_NAMES)}. "
                    "Get the files again."
                )
            for name, weight in items:
                part = file.get_slice(name)
                shape, wanted = tuple(part.get_shape()), tuple(weight.tensor.shape)
                if shape != wanted:
                    shapes.append(f"{name} is {shape} instead of {wanted}")
                if str(part.get_dtype()).startswith(("F", "BF")) != weight.tensor.is_floating_point():
                    kinds.append(f"{name} is {part.get_dtype()} instead of {weight.tensor.dtype}")
    for problems, what in ((shapes, "shapes"), (kinds, "kinds of number")):
        if problems:
            found = some_of(problems, _NUM_NAMES)
            raise CheckpointError(f"{folder} must have the {what} of the model, but {found}. {_OTHER_LAYOUT}")


def _refuse_out_of_range(plan: dict[Path, list[tuple[str, Weight]]], mesh: DeviceMesh) -> None:
    """Raise CheckpointError if a finite value would be infinite in the model's dtype. Reads tensors of wider dtypes."""
    for path, items in plan.items():
        with _open(path) as file:
            for name, weight in items:
                dtype = weight.tensor.dtype
                if _LARGEST.get(file.get_slice(name).get_dtype(), 0.0) <= _largest(dtype):
                    continue
                largest = overflow(_read(file, name, weight.tensor, mesh), dtype)
                refuse_overflows({} if largest is None else {name: largest}, dtype, _KEEP_RANGE)


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else math.inf


def _fill(plan: dict[Path, list[tuple[str, Weight]]], mesh: DeviceMesh) -> None:
    filled: dict[int, str] = {}
    for path, items in plan.items():
        with _open(path) as file:
            for name, weight in items:
                local, values = weight.local, _read(file, name, weight.tensor, mesh)
                first = filled.setdefault(id(weight), name)
                if first == name:
                    local.copy_(values)
                elif not torch.equal(local, values.to(local)):
                    raise CheckpointError(
                        f"{first} and {name} are one tied parameter, but have different values in {path.parent}. Untie "
                        "it in the model (transformers: tie_word_embeddings=False), or correct the files."
                    )


def _read(file: Any, name: str, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of a tensor, or all of one that is not sharded, in the dtype of the file, on the CPU."""
    if not isinstance(tensor, DTensor) or shard_size(mesh) == 1:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    start = first_row(tensor)
    rows: torch.Tensor = file.get_slice(name)[start : start + tensor.to_local().shape[0]]
    return rows
