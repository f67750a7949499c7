"""Reads a DeepSpeed checkpoint: from the files of all its ranks to named tensors, which are mapped, and numbers."""

import reprlib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zeroamp.deepspeed.archives import Inert
from zeroamp.deepspeed.files import CONVERT, CheckpointFiles, Entries, read_file, unreadable
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
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.model_weights import file_name

_ENGINE_KEYS = frozenset(
    (
        *("buffer_names", "frozen_param_fragments", "frozen_param_shapes", "module", "param_shapes", "shared_params"),
        *("checkpoint_parallel_dimensions", "dp_world_size", "mp_world_size", "universal_checkpoint_info"),
        *("data_sampler", "lr_scheduler", "optimizer", "random_ltd"),
        *("ds_config", "ds_version", "global_samples", "global_steps", "skipped_steps"),
    )
)
"""Keys that DeepSpeed's engine writes. All other keys in its file are the client state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """The optimizer's state by parameter, and its param groups."""

    tensors: dict[str, dict[str, StoredTensor]]
    """Parameter name -> state key, such as "exp_avg" -> tensor. No entry before the first step."""
    steps: dict[str, float]
    """Parameter name -> number of updates."""
    group_of: dict[str, int]
    """Parameter name -> param group."""
    param_groups: list[dict[str, Any]] | None
    """Hyperparameters of each param group; None if the checkpoint has none (`elastic_checkpoint`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The content of a checkpoint, by name. Elements of its tensors are mapped, not read."""

    stage: int
    num_ranks: int
    """Number of ranks that wrote it."""
    version: str | None
    """The version of DeepSpeed that wrote it."""
    parameters: dict[str, StoredTensor]
    """Trained parameters in the dtype of the master weights, frozen ones in the module's dtype."""
    aliases: dict[str, str]
    """Other name of a shared parameter -> the name that it is stored under."""
    buffers: dict[str, torch.Tensor]
    other_state: list[str]
    """Names of the module's state that is not a tensor, and of the engine's state that zeroamp does not have."""
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
        CheckpointError: a file is refused or damaged, or the files belong to different checkpoints.
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
                f"{model.file}: {key} is {reprlib.repr(size)}, so the model is split over ranks. zeroamp reads only "
                f"checkpoints with data parallelism alone. {CONVERT}"
            )


def _stage(optimizers: list[Entries]) -> int:
    """Return the ZeRO stage. DeepSpeed's BF16_Optimizer, a class of stage 1, does not write it."""
    if not optimizers:
        return 0
    stage: Any = optimizers[0].values.get("zero_stage", 1)
    stage = stage.args[0] if isinstance(stage, Inert) and stage.args else stage
    if not (isinstance(stage, int) and stage in (1, 2, 3)):
        raise unreadable(f"{optimizers[0].file}: zero_stage", reprlib.repr(stage), "1, 2 or 3")
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
                f"{optimizer.file}: partition_count is {reprlib.repr(counts)}, but there are files of "
                f"{len(optimizers)} ranks. Copy the files of all ranks of this checkpoint here, and no others. If the "
                f"model has experts: {CONVERT}"
            )
        if len(flat) != len(flats[0]):
            raise unreadable(f"{optimizer.file}: {key}", f"{len(flat)} groups", f"{len(flats[0])} groups, as of rank 0")
    return flats


def _tensors(entries: Entries, key: str) -> list[torch.Tensor]:
    tensors = entries.get(key, list)
    for tensor in tensors:
        if not (isinstance(tensor, torch.Tensor) and tensor.ndim == 1 and tensor.is_floating_point()):
            found = f"a list with a {type(tensor).__name__}"
            raise unreadable(f"{entries.file}: {key}", found, "a list of 1-D floating-point tensors")
    return [tensor.detach() for tensor in tensors]


def _shapes(model: Entries, shapes: dict[str, Any]) -> Shapes:
    if not all(isinstance(shape, torch.Size) for shape in shapes.values()):
        raise unreadable(f"{model.file}: param_shapes", reprlib.repr(shapes), "names with shapes")
    return {file_name(str(name)): tuple(shape) for name, shape in shapes.items()}


def _place(groups: list[Shapes], flats: Flats, optimizers: list[Entries], stage: int) -> dict[str, PlacedParameter]:
    if any(len(flat) != len(groups) for flat in flats):
        where = f"{optimizers[0].file}: the number of flat groups"
        raise unreadable(where, len(flats[0]), f"{len(groups)}, as in param_shapes")
    if stage == 3:
        return place_parts(groups, flats)
    paddings = optimizers[0].optional("param_alignment_paddings", list) if optimizers else None
    if paddings is not None and [len(padding) for padding in paddings] != [len(shapes) for shapes in groups]:
        where = f"{optimizers[0].file}: param_alignment_paddings"
        raise unreadable(where, reprlib.repr(paddings), "one number per parameter")
    return place_stretches(groups, paddings, flats)


def _aliases(shared: Entries) -> dict[str, str]:
    return {file_name(str(name)): file_name(shared.get(name, str)) for name in shared.values}


def _by_file_name(entries: Entries) -> dict[str, Any]:
    return {file_name(str(name)): value for name, value in entries.values.items()}


def _same_storage(module: dict[str, Any]) -> dict[str, str]:
    """Return the aliases of stage 0, whose files do not list them: names with the same storage."""
    first: dict[object, str] = {}
    tensors = {name: value for name, value in module.items() if isinstance(value, torch.Tensor) and value.numel() > 0}
    owners = {name: first.setdefault((value.data_ptr(), value.shape), name) for name, value in tensors.items()}
    return {name: owner for name, owner in owners.items() if name != owner}


def _frozen(module: dict[str, Any], others: set[str]) -> dict[str, StoredTensor]:
    return {
        name: whole(value) for name, value in module.items() if name not in others and isinstance(value, torch.Tensor)
    }


def _frozen_parts(models: list[Entries]) -> dict[str, StoredTensor]:
    """Return the frozen parameters of stage 3; an empty dict if the checkpoint was saved without them."""
    first = models[0]
    shapes = _shapes(first, first.optional("frozen_param_shapes", dict) or {})
    if not shapes:
        return {}
    parts = [Entries(model.file, _by_file_name(model.inside("frozen_param_fragments"))) for model in models]
    return {
        name: place_frozen(shape, [rank.get(name, torch.Tensor) for rank in parts]) for name, shape in shapes.items()
    }


def _refuse_low_precision(model: Entries, parameters: dict[str, StoredTensor]) -> None:
    """Raise CheckpointError for a 16-bit model at stage 0: its fp32 weights are stored without names."""
    for name, stored in parameters.items():
        if stored.dtype in (torch.float16, torch.bfloat16):
            raise CheckpointError(
                f"{model.file}: {name} is {stored.dtype} at ZeRO stage 0, whose files do not name the fp32 weights. "
                "Load the checkpoint with DeepSpeed at stage 1 and save it again."
            )


def read_moments(optimizers: list[Entries], placed: dict[str, PlacedParameter], stage: int) -> Moments:
    """Read the base optimizer's state of all ranks.

    Raises:
        CheckpointError: the optimizer state does not have one tensor per flat vector of weights.
    """
    ranks = [_base_state(optimizer, stage) for optimizer in optimizers]
    groups = ranks[0][1]
    group_of_flat = [g for g, group in enumerate(groups or []) for _ in group["params"]]
    num_flats = 1 + max((parameter.group for parameter in placed.values()), default=-1)
    if groups is not None and len(group_of_flat) != num_flats:
        where = f"{optimizers[0].file}: the number of tensors in param_groups"
        raise unreadable(where, len(group_of_flat), f"{num_flats}, one per flat vector")
    tensors: dict[str, dict[str, StoredTensor]] = {}
    steps: dict[str, float] = {}
    for name, parameter in placed.items():
        states = [states.get(parameter.group, {}) for states, _ in ranks]
        group = groups[group_of_flat[parameter.group]] if groups is not None else {}
        keys = [key for key, value in states[0].items() if isinstance(value, torch.Tensor) and value.ndim == 1]
        if keys:
            tensors[name] = {key: _take(optimizers, states, parameter, key) for key in keys}
            steps[name] = _step(optimizers[0], states[0], group)
    return Moments(
        tensors=tensors,
        steps=steps,
        group_of={name: group_of_flat[p.group] if groups is not None else p.group for name, p in placed.items()},
        param_groups=groups,
    )


def _base_state(optimizer: Entries, stage: int) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]] | None]:
    """Return index of a flat vector -> its state, and the param groups.

    The file has the dict of `torch.optim.Optimizer.state_dict`, or a list of states without param groups.
    """
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    if isinstance(optimizer.values.get(key), list):
        return dict(enumerate(optimizer.each(key, dict))), None
    base = optimizer.inside(key)
    states, groups = base.inside("state"), base.each("param_groups", dict)
    for group in groups:
        Entries(f"{base.file}: param_groups", group).get("params", list)
    return {index: states.inside(index).values for index in states.values}, groups


def _take(
    optimizers: list[Entries], states: list[dict[str, Any]], parameter: PlacedParameter, key: str
) -> StoredTensor:
    flats = []
    for rank, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        flat = state.get(key)
        needed = max((p.start + p.end - p.begin for p in parameter.places if p.rank == rank), default=0)
        if not isinstance(flat, torch.Tensor) or flat.ndim != 1 or flat.numel() < needed:
            found = f"of {flat.numel()}" if isinstance(flat, torch.Tensor) else "missing"
            raise unreadable(f"{optimizer.file}: {key}", found, f"of {needed} or more elements, as the weights")
        flats.append(flat)
    return parameter.take(flats)


def _step(optimizer: Entries, state: dict[str, Any], group: dict[str, Any]) -> float:
    """Return the number of steps, from the state, or from the param group for DeepSpeed's older FusedAdam."""
    step = state.get("step", group.get("step", optimizer.values.get("base_optimizer_state_step")))
    if not isinstance(step, (int, float, torch.Tensor)) or (isinstance(step, torch.Tensor) and step.numel() != 1):
        raise unreadable(f"{optimizer.file}: step", reprlib.repr(step), "a number")
    return float(step)


def find(names: Iterable[str], aliases: dict[str, str], stored: Container[str]) -> list[str]:
    """Return the names under which a parameter, known by `names`, is stored."""
    candidates = [name if name in stored else aliases.get(name, name) for name in names]
    return [name for name in dict.fromkeys(candidates) if name in stored]
