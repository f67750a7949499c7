"""`export_hf`, and the pipeline behind every export to safetensors: tensor by tensor, file by file.

plan      names, dtypes and files, from shapes alone; values out of the dtype's range are refused
draft     a new folder beside the target, or inside the target if that exists
write     one file per rank at a time: all ranks read each tensor, and the rank that writes its file retains it
publish   the files of the draft replace those of an earlier export
"""

import copy
import hashlib
import logging
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import axis_groups, device_of
from zeroamp.policies.dtypes import DTYPE_BY_NAME, short_name
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.rank_group import RankGroup
from zeroamp.weights.drafts import has_writer, locked, make_draft, make_folder, sync_to_disk, unlock
from zeroamp.weights.files import (
    MANIFEST,
    MODEL_STEM,
    TensorSpec,
    WeightFile,
    plan_files,
    publish,
    safetensors_torch,
    write_files,
    write_index,
)
from zeroamp.weights.model_weights import Weight, find_weights
from zeroamp.wrapping.state import wrap_state

T = TypeVar("T")
logger = logging.getLogger("zeroamp")
_NUM_DIGITS = 8  # of the random end of a draft's name


def export_hf(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5 * 1000**3,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a wrapped model to `folder` as safetensors that `from_pretrained` reads. All ranks call it.

    Names and shapes are those of the model's `state_dict()`. Tied parameters are written once. For a transformers
    model, `config.json` and `generation_config.json` are written too. If the folder exists, the weights of an earlier
    export are replaced when the new ones are complete; other files stay.

    Besides its shards, a rank holds at most one file and one tensor in memory: each rank writes some of the files,
    shards are cast and all-gathered tensor by tensor, and only the rank that writes a tensor's file retains it.

    Args:
        model: a model that `wrap_model` returned, at any stage, before training, between two steps or after.
        folder: a folder on a file system that all ranks share. It is created if it does not exist.
        dtype: dtype of floating-point parameters: "fp32", "bf16", "fp16" or a torch dtype. None: the config's low dtype
            if it sets `stage3_gather_16bit_weights_on_model_save`, else fp32. Buffers keep their dtype, and the first
            rank's values are written.
        max_shard_bytes: the largest number of bytes of tensors in one file. A larger tensor gets its own file.
        exclude_frozen_parameters: leave out parameters with `requires_grad` False.

    Raises:
        CheckpointError: on all ranks. Before anything is written: the model has adapters of peft or weights that
            bitsandbytes quantized, the ranks pass different arguments or differ in a parameter of `ignored_params`, a
            finite value would be infinite in `dtype`, or safetensors is not installed. Later: a rank cannot write.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    _refuse_adapters(state.root)
    if not exclude_frozen_parameters:
        _refuse_quantized(state.root)

    def is_written(weight: Weight) -> bool:
        return not (exclude_frozen_parameters and weight.is_parameter and not weight.tensor.requires_grad)

    with torch.no_grad():
        export_tensors(
            lambda: _sources([each for each in find_weights(state.root) if is_written(each)], state.axes.whole),
            folder,
            lambda: export_dtype(dtype, state.plan.policy.export_dtype),
            max_shard_bytes,
            partial(save_config, state.root),
            RankGroup.for_saving(state.axes.whole),
        )


def find_adapter(root: nn.Module) -> str | None:
    """Return the FQN of the first module of peft, or None if there is none."""
    modules: dict[str, nn.Module] = dict(root.named_modules())
    of_peft = (
        fqn for fqn, each in modules.items() if any(c.__module__.startswith("peft.") for c in type(each).__mro__)
    )
    return next(of_peft, None)


def _refuse_adapters(root: nn.Module) -> None:
    """Raise CheckpointError for modules of peft: `from_pretrained` does not load their names, or adapters."""
    fqn = find_adapter(root)
    if fqn is not None:
        raise CheckpointError(
            f"export_hf cannot write {type(root).__name__}: {fqn or 'the model'} is a peft module, and from_pretrained "
            "cannot load the names of adapters and of the layers that they wrap. Call zeroamp.integrations.peft: "
            "export_adapter(model, folder) writes an adapter, which peft merges in one process (docs/peft.md)."
        )


def _refuse_quantized(root: nn.Module) -> None:
    """Raise CheckpointError for packed weights of bitsandbytes, whose scales are not in the parameters."""
    for fqn, module in root.named_modules():
        if getattr(module, "quant_state", None) is not None:
            raise CheckpointError(
                f"export_hf cannot write {fqn}.weight: it is quantized by bitsandbytes. Pass "
                "exclude_frozen_parameters=True to write the trainable parameters. "
                "zeroamp.integrations.peft.export_adapter writes adapters."
            )


def _sources(weights: list[Weight], mesh: DeviceMesh) -> list["Source"]:
    return [source_of(weight, name, mesh) for weight in weights for name in weight.written_names]


def source_of(weight: Weight, name: str, mesh: DeviceMesh) -> "Source":
    """Return the `Source` that exports a weight under `name`, unchanged."""
    return Source(
        name=name,
        shape=tuple(weight.tensor.shape),
        dtype=weight.tensor.dtype,
        is_parameter=weight.is_parameter,
        read=partial(whole_weight, weight, mesh),
        local=weight.local,
        is_of_each_rank=weight.is_parameter and not isinstance(weight.tensor, DTensor),
    )


def whole_weight(weight: Weight, mesh: DeviceMesh, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole weight in `dtype`, on the mesh's device. Every rank of `mesh`, which has all ranks, calls this.

    The shard is cast before the all-gather, which moves fewer bytes. Rounding is per element, so the bits are the same.
    """
    local = weight.local.to(device_of(mesh), dtype)
    if isinstance(weight.tensor, DTensor):
        shape, stride = weight.tensor.shape, weight.tensor.stride()
        own, placements = weight.tensor.device_mesh, weight.tensor.placements
        sharded = DTensor.from_local(local, own, placements, run_check=False, shape=shape, stride=stride)
        return sharded.full_tensor()
    values = local.clone(memory_format=torch.contiguous_format)
    for group in axis_groups(mesh):
        dist.broadcast(values, group=group, group_src=0)
    return values


def save_config(
    model: nn.Module, folder: Path, dtype: torch.dtype, change: Callable[[Any], None] | None = None
) -> None:
    """Write the config files that `from_pretrained` needs, if `model` is a transformers model.

    The model's own config is not changed. `change` edits the copy that is written.
    """
    transformers = sys.modules.get("transformers")  # imported if the model is a transformers model
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    # fully_shard has replaced the class by a subclass.
    architecture = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [architecture.__name__]
    if change is not None:
        change(config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One tensor to export: its name, its form, and a function that reads it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of the stored tensor."""
    is_parameter: bool
    read: Callable[[torch.dtype], torch.Tensor]
    """Returns the whole tensor in the given dtype. If several ranks export, it is a collective of all of them."""
    local: torch.Tensor | None = None
    """This rank's shard. Its range is checked before anything is written. None: `read` checks the range."""
    is_of_each_rank: bool = False
    """Whether `local` is a whole parameter that each rank updates by itself. The export raises if ranks differ."""

    def written_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of this tensor in an export as `dtype`: buffers and integers keep their own."""
        return dtype if self.is_parameter and self.dtype.is_floating_point else self.dtype


class OneProcess:
    """The interface of `RankGroup` for a single process."""

    rank, num_ranks = 0, 1

    def run(self, action: Callable[[], T]) -> list[T]:
        """Run `action`. Return its result in a list, as that of the only rank."""
        return [action()]

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action`, and return its result."""
        return action()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The export that one rank has planned. The ranks exchange their plans, to check that they are the same."""

    folder: Path
    dtype: torch.dtype
    files_digest: str
    draft: Path
    """Path of the draft. All ranks use the first rank's."""
    overflows: dict[str, float]
    """Parameter -> the largest magnitude in this rank's shard, for parameters that `dtype` would round to infinity."""
    of_each_rank: dict[str, str]
    """Parameter that each rank holds whole -> digest of its values."""


def export_tensors(
    find_sources: Callable[[], Sequence[Source]],
    folder: str | os.PathLike[str],
    choose_dtype: Callable[[], torch.dtype],
    max_shard_bytes: int,
    write_config: Callable[[Path, torch.dtype], None],
    ranks: RankGroup | OneProcess,
    stem: str = MODEL_STEM,
) -> None:
    """Write tensors to `folder` as safetensors files. All of `ranks` call this.

    Args:
        find_sources: returns the tensors in the order of the files.
        folder: see `export_hf`.
        choose_dtype: returns the dtype of floating-point parameters.
        max_shard_bytes: see `export_hf`.
        write_config: writes the model's config into a folder, given the dtype. The first rank calls it.
        ranks: the ranks that write. An error of `find_sources` or `choose_dtype` on one is raised on all.
        stem: the beginning of the names of the files.

    Raises:
        CheckpointError: as `export_hf`.
    """
    sources: dict[str, Source] = {}
    files: list[WeightFile] = []

    def plan() -> _Plan:
        dtype = choose_dtype()
        sources.update((source.name, source) for source in find_sources())
        specs = (TensorSpec(name=s.name, shape=s.shape, dtype=s.written_dtype(dtype)) for s in sources.values())
        files.extend(plan_files(specs, max_shard_bytes, stem))
        return _plan(list(sources.values()), files, Path(folder).absolute(), dtype)

    plans = ranks.run(plan)
    _check(plans)
    _write(lambda spec: sources[spec.name].read(spec.dtype), files, plans[0], write_config, ranks, stem)


def _plan(sources: list[Source], files: list[WeightFile], folder: Path, dtype: torch.dtype) -> _Plan:
    safetensors_torch()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"Cannot export into {folder}: it is a file. Pass a folder, or a new path.")
    if (folder / MANIFEST).exists():
        raise CheckpointError(f"Cannot export into {folder}: it is a checkpoint. Pass another folder.")
    suffix = f"draft-{uuid.uuid4().hex[:_NUM_DIGITS]}"
    found = {s.name: overflow(s.local, s.written_dtype(dtype)) for s in sources if s.local is not None}
    return _Plan(
        folder=folder,
        dtype=dtype,
        files_digest=hashlib.sha256(repr([(file.name, file.tensors) for file in files]).encode()).hexdigest(),
        # Inside a folder that exists, because the folder may be a mount point: a rename from beside it would fail.
        draft=folder / f".{suffix}" if folder.exists() else folder.with_name(f".{folder.name}.{suffix}"),
        overflows={name: largest for name, largest in found.items() if largest is not None},
        of_each_rank={s.name: _digest(s.local) for s in sources if s.is_of_each_rank and s.local is not None},
    )


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def _check(plans: list[_Plan]) -> None:
    """Raise the same error on all ranks if their plans differ, or if any rank has found values out of range."""
    for what in ("folder", "dtype", "files_digest"):
        found = sorted({str(getattr(plan, what)) for plan in plans})
        if len(found) > 1:
            plan_of_files = "plan of files differs: names, shapes or dtypes of the tensors, or max_shard_bytes"
            differing = plan_of_files if what == "files_digest" else f"{what} differs: {' and '.join(found)}"
            raise CheckpointError(
                f"An export must get the same model and arguments on all ranks, but the {differing}. Pass the same on "
                "all ranks."
            )
    for name, digest in plans[0].of_each_rank.items():
        if any(plan.of_each_rank[name] != digest for plan in plans):
            raise CheckpointError(
                f"{name} is held whole by each rank (wrap_model(ignored_params=...)), but its values differ between "
                "ranks. Give all ranks the same values before the export, for example by torch.distributed.broadcast("
                "parameter.data, 0)."
            )
    overflows: dict[str, float] = {}
    for name, largest in (item for plan in plans for item in plan.overflows.items()):
        overflows[name] = max(largest, overflows.get(name, 0.0))
    refuse_overflows(overflows, plans[0].dtype)


def _write(
    read: Callable[[TensorSpec], torch.Tensor],
    files: list[WeightFile],
    plan: _Plan,
    write_config: Callable[[Path, torch.dtype], None],
    ranks: RankGroup | OneProcess,
    stem: str,
) -> None:
    draft = plan.draft
    is_complete = False
    locks: list[int] = []  # the first rank's, while the export runs

    def begin() -> None:
        locks.append(_open_draft(draft))
        write_config(draft, plan.dtype)
        for path in draft.iterdir():
            sync_to_disk(path)

    try:
        ranks.on_first(begin)
        ranks.run(lambda: _refuse_unshared(draft))
        for start in range(0, len(files), ranks.num_ranks):  # one file per rank at a time: they write together
            some = files[start : start + ranks.num_ranks]
            ranks.run(lambda some=some: write_files(some, read, draft, ranks.rank))  # type: ignore[misc]
            for file in some if ranks.rank == 0 else ():
                logger.info("Wrote %s: %d tensors, %d bytes.", file.name, len(file.tensors), file.num_bytes)
        ranks.on_first(lambda: write_index(files, draft))
        is_complete = True
        ranks.on_first(lambda: publish(draft, plan.folder, stem))
    finally:
        for lock in locks:
            unlock(lock)
        if locks and not is_complete:
            shutil.rmtree(draft, ignore_errors=True)


def _open_draft(path: Path) -> int:
    """Create an empty draft and return its lock. Remove the drafts of killed exports to the same place."""
    make_folder(path.parent)
    of_place = re.compile(re.escape(path.name[:-_NUM_DIGITS]) + rf"[0-9a-f]{{{_NUM_DIGITS}}}")
    with locked(path.parent) as has_locks:
        for other in path.parent.iterdir() if has_locks else ():
            # A draft without a lock file is complete: its files could not be moved, and the error named the draft.
            if of_place.fullmatch(other.name) and other.is_dir() and has_writer(other) is False:
                shutil.rmtree(other, ignore_errors=True)
        return make_draft(path)


def _refuse_unshared(draft: Path) -> None:
    with suppress(OSError):
        os.listdir(draft.parent)  # refreshes a network file system's cache of the folder
    if not draft.is_dir():
        raise CheckpointError(
            f"{draft.parent} must be on a file system that all ranks share, but this rank does not see a folder that "
            "the first rank created there. Export to a shared file system."
        )


def export_dtype(requested: str | torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """Return `requested` as a torch dtype, or `default` for None.

    Raises:
        CheckpointError: `requested` is not fp32, bf16 or fp16.
    """
    named = DTYPE_BY_NAME.get(requested, requested) if isinstance(requested, str) else requested
    dtype = default if named is None else named
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_BY_NAME.values():
        valid = '"fp32", "bf16" or "fp16"'
        raise CheckpointError(describe("the dtype of an export", repr(requested), valid, "Pass one of them."))
    return dtype


def overflow(tensor: torch.Tensor, dtype: torch.dtype) -> float | None:
    """Return the largest finite magnitude in `tensor` if `dtype` rounds it to infinity, else None."""
    if dtype == tensor.dtype or torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max or tensor.numel() == 0:
        return None
    largest = torch.stack(tensor.aminmax()).abs().max()
    if not largest.isfinite():
        finite = tensor[tensor.isfinite()]
        largest = finite.abs().max() if finite.numel() else largest.new_zeros(())
    return float(largest) if largest.to(dtype).isinf() else None


def refuse_overflows(overflows: dict[str, float], dtype: torch.dtype, remedy: str | None = None) -> None:
    """Raise CheckpointError if there are `overflows`: parameter -> largest magnitude, which `dtype` cannot hold."""
    if not overflows:
        return
    name, largest = next(iter(overflows.items()))
    more = f" {len(overflows) - 1} more parameters have such a value." if len(overflows) > 1 else ""
    wider = 'dtype="bf16" or dtype="fp32"' if dtype == torch.float16 else 'dtype="fp32"'
    raise CheckpointError(
        f"{name} has a value of magnitude {largest:g}, but the largest number of {short_name(dtype)} is "
        f"{torch.finfo(dtype).max:g}.{more} {remedy or f'Export with {wider}.'}"
    )
