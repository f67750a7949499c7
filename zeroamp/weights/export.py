"""`export_hf`: a sharded model as whole safetensors files, tensor by tensor."""

import copy
import hashlib
import os
import shutil
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import device_of
from zeroamp.policies.dtypes import DTYPE_BY_NAME
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.weights.dtype_range import overflow, refuse
from zeroamp.weights.files import (
    MANIFEST,
    TensorSpec,
    WeightFile,
    plan_files,
    publish,
    safetensors_torch,
    write_files,
    write_index,
)
from zeroamp.weights.model_weights import Weight, find_weights
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import WrapState, wrap_state


@dataclass(frozen=True, kw_only=True, slots=True)
class _Export:
    """What one rank is about to do, and the others must be too. They tell each other: it is small."""

    folder: Path
    dtype: torch.dtype
    files_digest: str
    draft: Path
    """Of the first rank, for all."""
    overflows: dict[str, float]
    """Parameter -> the largest magnitude in this rank's shard, where `dtype` cannot hold it."""


def export_hf(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5 * 1000**3,
) -> None:
    """Write the weights of a wrapped model to `folder` as safetensors that `from_pretrained` reads. All ranks call it.

    Names and shapes are the model's own (its `state_dict()`), tied parameters once. With a transformers model come its
    `config.json` and `generation_config.json`. In a folder that exists, the weights of an earlier export are replaced
    once the new ones are complete; other files stay.

    A rank holds at most one file and one tensor beside its shards: the files are dealt to the ranks, tensors are cast
    as shards and gathered one by one, and each is kept by the rank of its file.

    Args:
        model: from `wrap_model`, at any stage, before training, between two steps or after.
        folder: that all ranks see. It is made where there is none.
        dtype: "fp32", "bf16" or "fp16", or torch's dtype, of floating-point parameters. None: the config's low dtype
            where it sets `stage3_gather_16bit_weights_on_model_save`, else fp32. Buffers keep the dtype they have, and
            are the first rank's.
        max_shard_bytes: of the tensors of one file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: on all ranks, before anything is written where it can be known: the ranks ask for different
            things, a finite value would be infinite in `dtype`, safetensors is not installed; or a rank cannot write.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    with torch.no_grad():
        weights: list[Weight] = []
        files: list[WeightFile] = []

        def plan() -> _Export:
            target = export_dtype(dtype, state.plan.policy.export_dtype)
            weights.extend(find_weights(state.root))
            files.extend(plan_files(_specs(weights, target), max_shard_bytes))
            return _plan(weights, files, Path(folder).absolute(), target)

        exports = RankGroup.for_saving(state.mesh).run(plan)
        _check(exports)
        _write(state, weights, files, exports[0])


def _plan(weights: list[Weight], files: list[WeightFile], folder: Path, dtype: torch.dtype) -> _Export:
    safetensors_torch()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(describe(str(folder), "a file", "a folder, or nothing yet", "Name another place."))
    refuse_checkpoint(folder)
    suffix = f"draft-{uuid.uuid4().hex[:8]}"
    return _Export(
        folder=folder,
        dtype=dtype,
        files_digest=hashlib.sha256(repr([(file.name, file.tensors) for file in files]).encode()).hexdigest(),
        # Inside a folder that exists: it may be the root of a file system of its own.
        draft=folder / f".{suffix}" if folder.exists() else folder.with_name(f".{folder.name}.{suffix}"),
        overflows=_overflows(weights, dtype),
    )


def refuse_checkpoint(folder: Path) -> None:
    """Raise CheckpointError where an export would change the files of a checkpoint."""
    if (folder / MANIFEST).exists():
        raise CheckpointError(describe(str(folder), "a checkpoint", "another folder", "Name one for the export."))


def export_dtype(asked: str | torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """Return the dtype that is asked for. Raises CheckpointError unless it is fp32, bf16 or fp16."""
    dtype = default if asked is None else DTYPE_BY_NAME.get(asked, asked) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_BY_NAME.values():
        found = repr(asked)
        raise CheckpointError(describe("export_hf(dtype=)", found, '"fp32", "bf16" or "fp16"', "Name one of them."))
    return dtype


def _specs(weights: list[Weight], dtype: torch.dtype) -> list[TensorSpec]:
    return [
        TensorSpec(name=name, shape=tuple(weight.tensor.shape), dtype=_written_dtype(weight, dtype))
        for weight in weights
        for name in weight.written_names
    ]


def _written_dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    return dtype if weight.is_parameter and weight.tensor.is_floating_point() else weight.tensor.dtype


def _overflows(weights: list[Weight], dtype: torch.dtype) -> dict[str, float]:
    """Return the parameters whose shard here has a finite value that the written dtype rounds to infinity."""
    found = {weight.written_names[0]: overflow(weight.local, _written_dtype(weight, dtype)) for weight in weights}
    return {name: largest for name, largest in found.items() if largest is not None}


def _check(exports: list[_Export]) -> None:
    """Raise the same error on all ranks where they differ, or where any has found values that do not fit."""
    first = exports[0]
    same = {"a folder": "folder", "a dtype": "dtype", "files": "files_digest"}
    for what, name in same.items():
        if any(getattr(export, name) != getattr(first, name) for export in exports):
            found = f"{what} not the same on all ranks"
            raise CheckpointError(
                describe("export_hf", found, "one call, alike on all ranks", "Pass the same everywhere.")
            )
    overflows: dict[str, float] = {}
    for name, largest in (item for export in exports for item in export.overflows.items()):
        overflows[name] = max(largest, overflows.get(name, 0.0))
    refuse(overflows, first.dtype)


def _write(state: WrapState, weights: list[Weight], files: list[WeightFile], export: _Export) -> None:
    draft, ranks = export.draft, RankGroup.for_saving(state.mesh)
    sources = {name: weight for weight in weights for name in weight.written_names}

    def read(spec: TensorSpec) -> torch.Tensor:
        return _whole(sources[spec.name], spec.dtype, state.mesh)

    try:
        ranks.on_first(lambda: _begin(state.root, draft, export.dtype))
        ranks.run(lambda: _see(draft))
        for start in range(0, len(files), ranks.num_ranks):  # one file per rank at a time: they write together
            some = files[start : start + ranks.num_ranks]
            ranks.run(lambda some=some: write_files(some, read, draft, ranks.rank))  # type: ignore[misc]
        ranks.on_first(lambda: write_index(files, draft))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    ranks.on_first(lambda: publish(draft, export.folder))


def _begin(root: nn.Module, draft: Path, dtype: torch.dtype) -> None:
    draft.mkdir(parents=True)
    save_config(root, draft, dtype)


def _see(draft: Path) -> None:
    with suppress(OSError):
        os.listdir(draft.parent)  # a network file system may remember that there was none
    if not draft.is_dir():
        raise CheckpointError(
            describe(
                str(draft.parent), "no folder that the first rank has made there", "one that all ranks see", "Share it."
            )
        )


def _whole(weight: Weight, dtype: torch.dtype, mesh: DeviceMesh) -> torch.Tensor:
    """Return a weight as a whole, on the device that communicates. Every rank of `mesh` calls this.

    A shard is cast before it travels: rounding is per element, so the bits are the same and the bytes may be half.
    """
    local = weight.local.to(device_of(mesh), dtype)
    if isinstance(weight.tensor, DTensor):
        shape, stride = weight.tensor.shape, weight.tensor.stride()
        sharded = DTensor.from_local(local, mesh, weight.tensor.placements, run_check=False, shape=shape, stride=stride)
        return sharded.full_tensor()
    values = local.clone(memory_format=torch.contiguous_format)
    for axis in range(mesh.ndim):
        dist.broadcast(values, group=mesh.get_group(axis), group_src=0)
    return values


def save_config(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Write what `from_pretrained` needs beside the weights, where `model` is transformers'; else nothing.

    The model's own config stays as it is.
    """
    transformers = sys.modules.get("transformers")  # which is loaded if the model is its own
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    # fully_shard has made a subclass.
    architecture = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [architecture.__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
