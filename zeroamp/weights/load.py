"""`load_hf`: safetensors files into a wrapped model, each rank reading its own slices."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import shard_size
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.weights.files import INDEX, SINGLE_FILE, read_index, safetensors_torch
from zeroamp.weights.model_weights import Weight, computed_buffers, find_weights
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import wrap_state

_NUM_NAMES = 5  # that an error lists, of thousands
_OTHER_LAYOUT = (
    "Where the architecture's files have another layout than its model, load it with transformers' from_pretrained "
    "before wrap_model instead."
)


def load_hf(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Fill a wrapped model from the safetensors in `folder`. All ranks call it.

    Every rank reads its own rows of each parameter, and all of each buffer, so a model that was wrapped on the meta
    device never is on one rank as a whole. Values are cast to the dtype that the model stores: files of bf16 fill fp32
    parameters. A tied parameter may be there under any of its names. Buffers that the model does not store (rotary
    frequencies) keep their values, and are passed over in files that have them.

    Args:
        model: from `wrap_model`.
        folder: with `model.safetensors`, or `model.safetensors.index.json` and the files it names.

    Raises:
        CheckpointError: on all ranks. With the model unchanged: there are no such files, or their names, shapes or
            kinds of number are not the model's (all are counted, the first few named). With the model filled in part:
            a file cannot be read through, or a tied parameter has two values.
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
        ranks.run(lambda: _fill(plan, state.mesh))


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor that the folder has."""
    index, single = folder / INDEX, folder / SINGLE_FILE
    if index.is_file():
        return {name: folder / file for name, file in read_index(index).items()}
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    pickles = next(folder.glob("pytorch_model*.bin*"), None)
    found = "no folder" if not folder.is_dir() else f"neither, but {pickles.name}" if pickles else "neither"
    remedy = "Name the folder of the weights; from a hub, download it first (huggingface_hub.snapshot_download)."
    if pickles:
        remedy = "A pickle may run any code: convert it once, by transformers' from_pretrained and save_pretrained."
    raise CheckpointError(describe(str(folder), found, f"{SINGLE_FILE}, or {INDEX} and its files", remedy))


def _open(path: Path) -> Any:
    safetensors_torch()
    from safetensors import SafetensorError, safe_open  # an extra: training needs none

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            describe(str(path), f"{type(error).__name__}: {error}", "a safetensors file", "Get the file again.")
        ) from error


def _refuse_other_names(
    weights: list[Weight], files: dict[str, Path], computed: set[str], folder: str | os.PathLike[str]
) -> None:
    missing = [weight.written_names[0] for weight in weights if not any(name in files for name in weight.names)]
    known = {name for weight in weights for name in weight.names}
    unexpected = [name for name in files if name not in known and name.rpartition(".")[2] not in computed]
    problems = [f"{kind} {_listed(names)}" for kind, names in (("no", missing), ("also", unexpected)) if names]
    if problems:
        raise CheckpointError(describe(str(folder), "; ".join(problems), "the names of the model", _OTHER_LAYOUT))


def _refuse_other_shapes(plan: dict[Path, list[tuple[str, Weight]]], folder: str | os.PathLike[str]) -> None:
    shapes, kinds = [], []
    for path, items in plan.items():
        with _open(path) as file:
            held = set(file.keys())
            if absent := [name for name, _ in items if name not in held]:
                found, valid = f"no {_listed(absent)}", f"what {INDEX} says is in it"
                raise CheckpointError(describe(str(path), found, valid, "Get the files again."))
            for name, weight in items:
                part = file.get_slice(name)
                shape, wanted = tuple(part.get_shape()), tuple(weight.tensor.shape)
                if shape != wanted:
                    shapes.append(f"{name} of {shape} for {wanted}")
                if _is_float(part) != weight.tensor.is_floating_point():
                    kinds.append(f"{name} in {part.get_dtype()} for {weight.tensor.dtype}")
    for problems, valid in ((shapes, "the shapes of the model"), (kinds, "numbers of the model's kind")):
        if problems:
            raise CheckpointError(describe(str(folder), _listed(problems), valid, _OTHER_LAYOUT))


def _is_float(part: Any) -> bool:
    return str(part.get_dtype()).startswith(("F", "BF"))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
    return ", ".join(names[:_NUM_NAMES]) + more


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
                    found = "values that differ, of one tied parameter"
                    remedy = "Untie it in the model (transformers: tie_word_embeddings=False), or mend the files."
                    raise CheckpointError(describe(f"{first} and {name}", found, "the same ones", remedy))


def _read(file: Any, name: str, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return what this rank holds of a tensor, in the dtype of the file, on the CPU."""
    if not isinstance(tensor, DTensor) or shard_size(mesh) == 1:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    # FSDP2 shards dim 0 as torch.chunk does.
    num_rows = -(-tensor.shape[0] // shard_size(mesh))
    start = min(mesh.get_local_rank(mesh.ndim - 1) * num_rows, tensor.shape[0])
    rows: torch.Tensor = file.get_slice(name)[start : start + tensor.to_local().shape[0]]
    return rows
