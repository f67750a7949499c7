"""What a DeepSpeed checkpoint holds, by name: from the files of all its ranks to mapped tensors and numbers."""

from dataclasses import dataclass
from typing import Any

import torch

from zeroamp.deepspeed.files import CONVERT, CheckpointFiles, Entries, Inert, read_file
from zeroamp.deepspeed.layout import (
    Flats,
    PlacedParameter,
    Shapes,
    StoredTensor,
    place_frozen,
    place_parts,
    place_stretches,
    whole,
)
from zeroamp.deepspeed.moments import Moments, read_moments
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.weights.model_weights import file_name

_ENGINE_KEYS = frozenset(
    (
        *("buffer_names", "frozen_param_fragments", "frozen_param_shapes", "module", "param_shapes", "shared_params"),
        *("checkpoint_parallel_dimensions", "dp_world_size", "mp_world_size", "universal_checkpoint_info"),
        *("data_sampler", "lr_scheduler", "optimizer", "random_ltd"),
        *("ds_config", "ds_version", "global_samples", "global_steps", "skipped_steps"),
    )
)
"""What the engine writes itself; all else in its file is the client's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A checkpoint, read but for its elements."""

    stage: int
    num_ranks: int
    """That wrote it."""
    version: str | None
    """Of DeepSpeed."""
    parameters: dict[str, StoredTensor]
    """Trained ones in the dtype of the master weights, frozen ones as the module had them."""
    aliases: dict[str, str]
    """Further name of a shared parameter -> the one it is stored under."""
    buffers: dict[str, torch.Tensor]
    other_state: list[str]
    """Of the module what is no tensor, and of the engine what has no counterpart here."""
    moments: Moments | None
    """None at stage 0."""
    loss_scaler: Inert | None
    global_steps: int
    """Optimizer steps, skipped ones included."""
    skipped_steps: int
    lr_scheduler: dict[str, Any] | None
    client_state: dict[str, Any]


def read_contents(files: CheckpointFiles) -> Contents:
    """Read all files of a checkpoint, mapping their tensors.

    Raises:
        CheckpointError: a file is refused or damaged, or what the files hold does not fit together.
    """
    models = [read_file(path) for path in files.model]
    engines = [read_file(path) for path in files.optimizer]
    optimizers = [engine.inside("optimizer_state_dict") for engine in engines]
    first = models[0]
    _refuse_parallel(first)
    stage = _stage(optimizers)
    flats = _flats(optimizers, stage)
    groups = [_shapes(first, shapes) for shapes in first.each("param_shapes", dict)] if optimizers else []
    placed = _place(groups, flats, optimizers, stage)
    module = _by_file_name(first.inside("module"))
    buffer_names = {name for name in map(file_name, first.each("buffer_names", str)) if name in module}
    aliases = _same_storage(module) if stage == 0 else _aliases(first.inside("shared_params"))
    trained = {name: parameter.take([flat[parameter.group] for flat in flats]) for name, parameter in placed.items()}
    frozen = _frozen_parts(models) if stage == 3 else _frozen(module, {*trained, *aliases, *buffer_names})
    if stage == 0:
        _refuse_low_precision(first, frozen)
    return Contents(
        stage=stage,
        num_ranks=max(1, len(optimizers)),
        version=first.optional("ds_version", str),
        parameters=trained | frozen,
        aliases=aliases,
        buffers={name: module[name] for name in buffer_names if isinstance(module[name], torch.Tensor)},
        other_state=[
            *(f"module state {name}" for name, value in module.items() if not isinstance(value, torch.Tensor)),
            *(key for key in ("data_sampler", "random_ltd") if first.values.get(key) is not None),
        ],
        moments=read_moments(optimizers, placed, stage) if optimizers else None,
        loss_scaler=optimizers[0].optional("loss_scaler", Inert) if optimizers else None,
        global_steps=first.get("global_steps", int),
        skipped_steps=first.get("skipped_steps", int),
        lr_scheduler=first.optional("lr_scheduler", dict),
        client_state={key: value for key, value in first.values.items() if key not in _ENGINE_KEYS},
    )


def _refuse_parallel(model: Entries) -> None:
    sizes = {"mp_world_size": model.optional("mp_world_size", int)} | (
        model.optional("checkpoint_parallel_dimensions", dict) or {}
    )
    for key, size in sizes.items():
        if not (size is None or (isinstance(size, int) and size == 1)):
            raise CheckpointError(
                describe(
                    f"{model.file}: {key}", f"{size}, a model that is split over ranks", "data parallelism", CONVERT
                )
            )


def _stage(optimizers: list[Entries]) -> int:
    """Return the ZeRO stage. BF16_Optimizer, which is stage 1 with another class, does not write it."""
    if not optimizers:
        return 0
    stage: Any = optimizers[0].values.get("zero_stage", 1)
    stage = stage.args[0] if isinstance(stage, Inert) and stage.args else stage
    if not (isinstance(stage, int) and stage in (1, 2, 3)):
        raise CheckpointError(describe(f"{optimizers[0].file}: zero_stage", repr(stage), "1, 2 or 3", CONVERT))
    return stage


def _flats(optimizers: list[Entries], stage: int) -> Flats:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    flats = [_tensors(optimizer, key) for optimizer in optimizers]
    for optimizer, flat in zip(optimizers, flats, strict=True):
        counts: Any = optimizer.values.get("partition_count")
        if "ds_zero_partition_groups" in optimizer.values or any(
            not isinstance(count, int) or count != len(optimizers)
            for count in (counts if isinstance(counts, list) else [counts])
        ):
            raise CheckpointError(
                describe(
                    f"{optimizer.file}: partition_count",
                    f"{counts} with the files of {len(optimizers)} ranks",
                    "every parameter partitioned over all the ranks that wrote files",
                    f"Copy the files of all ranks here, and of this checkpoint only. If some are experts: {CONVERT}",
                )
            )
        if len(flat) != len(flats[0]):
            raise CheckpointError(
                describe(f"{optimizer.file}: {key}", f"{len(flat)} groups", f"{len(flats[0])}, as rank 0 has", CONVERT)
            )
    return flats


def _tensors(entries: Entries, key: str) -> list[torch.Tensor]:
    tensors = entries.get(key, list)
    for tensor in tensors:
        if not (isinstance(tensor, torch.Tensor) and tensor.ndim == 1 and tensor.is_floating_point()):
            raise CheckpointError(
                describe(f"{entries.file}: {key}", f"a {type(tensor).__name__}", "1-D floating-point tensors", CONVERT)
            )
    return [tensor.detach() for tensor in tensors]


def _shapes(model: Entries, shapes: dict[str, Any]) -> Shapes:
    if not all(isinstance(shape, torch.Size) for shape in shapes.values()):
        raise CheckpointError(describe(f"{model.file}: param_shapes", repr(shapes)[:80], "names with shapes", CONVERT))
    return {file_name(str(name)): tuple(shape) for name, shape in shapes.items()}


def _place(groups: list[Shapes], flats: Flats, optimizers: list[Entries], stage: int) -> dict[str, PlacedParameter]:
    if any(len(flat) != len(groups) for flat in flats):
        raise CheckpointError(
            describe(optimizers[0].file, f"{len(flats[0])} flat groups", f"{len(groups)}, as param_shapes has", CONVERT)
        )
    if stage == 3:
        return place_parts(groups, flats)
    paddings = optimizers[0].optional("param_alignment_paddings", list) if optimizers else None
    if paddings is not None and [len(padding) for padding in paddings] != [len(shapes) for shapes in groups]:
        raise CheckpointError(
            describe(
                f"{optimizers[0].file}: param_alignment_paddings", repr(paddings)[:80], "one per parameter", CONVERT
            )
        )
    return place_stretches(groups, paddings, flats)


def _aliases(shared: Entries) -> dict[str, str]:
    return {file_name(str(name)): file_name(shared.get(name, str)) for name in shared.values}


def _by_file_name(entries: Entries) -> dict[str, Any]:
    return {file_name(str(name)): value for name, value in entries.values.items()}


def _same_storage(module: dict[str, Any]) -> dict[str, str]:
    """Return the aliases of stage 0, where only the shared storage tells them."""
    first: dict[object, str] = {}
    tensors = {name: value for name, value in module.items() if isinstance(value, torch.Tensor) and value.numel() > 0}
    owners = {name: first.setdefault((value.data_ptr(), value.shape), name) for name, value in tensors.items()}
    return {name: owner for name, owner in owners.items() if name != owner}


def _frozen(module: dict[str, Any], others: set[str]) -> dict[str, StoredTensor]:
    return {
        name: whole(value) for name, value in module.items() if name not in others and isinstance(value, torch.Tensor)
    }


def _frozen_parts(models: list[Entries]) -> dict[str, StoredTensor]:
    """Return the frozen parameters of stage 3; none where the checkpoint was saved without them."""
    first = models[0]
    shapes = _shapes(first, first.optional("frozen_param_shapes", dict) or {})
    if not shapes:
        return {}
    parts = [Entries(model.file, _by_file_name(model.inside("frozen_param_fragments"))) for model in models]
    return {
        name: place_frozen(shape, [rank.get(name, torch.Tensor) for rank in parts]) for name, shape in shapes.items()
    }


def _refuse_low_precision(model: Entries, parameters: dict[str, StoredTensor]) -> None:
    """Raise for a stage-0 checkpoint of a 16-bit model, whose fp32 weights lie in the optimizer without names."""
    for name, stored in parameters.items():
        if stored.dtype in (torch.float16, torch.bfloat16):
            raise CheckpointError(
                describe(
                    f"{model.file}: {name}",
                    f"{stored.dtype} at ZeRO stage 0, where nothing says which fp32 weight is whose",
                    "fp32 weights",
                    "Load it with DeepSpeed at stage 1 and save it again.",
                )
            )
