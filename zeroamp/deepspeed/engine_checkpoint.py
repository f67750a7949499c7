"""The engine's checkpoints: DeepSpeed's tags and its file `latest`, with `zeroamp.save_checkpoint` inside.

    FOLDER/latest            the tag of the newest checkpoint
    FOLDER/TAG/zeroamp/      a checkpoint of zeroamp.save_checkpoint

A folder that DeepSpeed wrote is refused: its own converter writes weights that `zeroamp.load_hf` reads.
"""

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import CheckpointError, StepError, describe, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.weights.drafts import replace_durably
from zeroamp.weights.export import overflow, refuse_overflows, whole_weight
from zeroamp.weights.model_weights import find_weights
from zeroamp.weights.untrusted_files import read_regular
from zeroamp.wrapping.refused_calls import replace_method
from zeroamp.wrapping.state import wrap_state

if TYPE_CHECKING:
    from zeroamp.deepspeed.engine import DeepSpeedEngine

logger = logging.getLogger("zeroamp")

LATEST, INSIDE = "latest", "zeroamp"
_MAX_TAG_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Which parts of a checkpoint `load` loads besides the module."""

    optimizer: bool
    scheduler: bool
    counts: bool
    """Steps, samples and the loss scale."""


def save(
    engine: "DeepSpeedEngine",
    folder: str | os.PathLike[str],
    tag: str | int | None,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    without_frozen: bool,
) -> bool:
    """Save a checkpoint as `folder/tag`, and write the tag into `folder/latest`. All ranks call it. Returns True.

    Args:
        engine: an engine with an optimizer, between two optimizer steps.
        folder: the run's folder, on a file system that all ranks share.
        tag: a folder name. None: global_step<number>. A checkpoint of the same tag is replaced once this one is on the
            disk.
        client_state: tensors, numbers, strings, None, and containers of them. A load returns the first rank's.
        save_latest: whether to write the tag into `latest`.
        without_frozen: whether to leave out frozen parameters.

    Raises:
        CheckpointError: `save_checkpoint` raises it, or the tag is not a folder name.
        StepError: called inside an optimizer step, or the engine has no optimizer.
    """
    train_step = engine._trained("save_checkpoint")
    if not folder:
        raise CheckpointError(describe("save_checkpoint(save_dir=)", repr(folder), "a folder", "Pass its path."))
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if not name or name in (".", "..", LATEST) or Path(name).name != name:
        raise CheckpointError(
            describe("save_checkpoint(tag=)", repr(tag), "the name of a folder", "Pass one such as 'global_step100'.")
        )
    counts = {"steps": engine.global_steps, "samples": engine.global_samples, "micro_steps": engine.micro_steps}
    save_checkpoint(
        Path(folder) / name / INSIDE,
        engine.module,
        train_step,
        step=engine.global_steps,
        extra={"client_state": dict(client_state), "counts": counts},
        keep=1,
        exclude_frozen_parameters=without_frozen,
    )
    if save_latest:
        ranks = RankGroup.for_saving(wrap_state(engine.module).axes.whole)
        ranks.on_first(lambda: replace_durably(Path(folder) / LATEST, name.encode()))
    return True


def load(
    engine: "DeepSpeedEngine", folder: str | os.PathLike[str], tag: str | int | None, parts: Parts
) -> tuple[str | None, dict[str, Any] | None]:
    """Load `folder/tag`, which `save` wrote. All ranks call it.

    Without a tag, `folder/latest` names it. If that file is missing, a warning is logged and (None, None) is returned,
    as in DeepSpeed, so that a script can start a new run.

    Returns:
        The path of the checkpoint, and the client state of the first rank.

    Raises:
        CheckpointError: the tag does not exist, DeepSpeed wrote it, or `load_checkpoint` raises it.
        StepError: called inside an optimizer step.
    """
    ranks = RankGroup.for_saving(wrap_state(engine.module).axes.whole)
    name = ranks.on_first(lambda: _find(Path(folder), tag))
    if name is None:
        if ranks.rank == 0:
            logger.warning(
                "%s does not exist, so nothing was loaded. Pass tag=, or the folder that save_checkpoint was given.",
                Path(folder) / LATEST,
            )
        return None, None
    path = Path(folder) / name
    client_state = _load(engine, path / INSIDE, parts)
    engine._num_accumulated = 0  # it is not 0 after zero_grad between micro-batches
    return str(path), client_state


def _find(folder: Path, tag: str | int | None) -> str | None:
    """Return the tag to load; None if `latest` is missing."""
    name = None if tag is None else str(tag)
    if name is None:
        try:
            name = read_regular(folder / LATEST, _MAX_TAG_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
    if Path(name).name != name or not (folder / name).is_dir():
        tags = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
        raise CheckpointError(f"{folder} has no checkpoint {name!r}. Pass one of its tags: {some_of(tags) or 'none'}.")
    if not (folder / name / INSIDE).is_dir():
        raise CheckpointError(
            f"{folder / name} was not written by zeroamp. For the weights of a checkpoint of DeepSpeed, run its "
            "`zero_to_fp32.py . OUTPUT --safe_serialization` in its folder, then zeroamp.load_hf(engine.module, "
            "OUTPUT) after initialize(). Optimizer state, step counts and loss scale of DeepSpeed cannot be loaded."
        )
    return name


def _load(engine: "DeepSpeedEngine", path: Path, parts: Parts) -> dict[str, Any]:
    train_step = engine.train_step if parts.counts else None
    extra = load_checkpoint(
        path,
        engine.module,
        train_step,
        load_optimizer_states=parts.optimizer,
        load_lr_scheduler_states=parts.scheduler and engine.lr_scheduler is not None,
        extra_rank=0,
    )
    if extra is None:
        raise AssertionError(f"expected client_state in {path}, which engine.save_checkpoint wrote")
    if parts.counts:
        counts = extra["counts"]
        engine.global_steps, engine.global_samples = counts["steps"], counts["samples"]
        engine.micro_steps = counts["micro_steps"]
    client_state: dict[str, Any] = extra["client_state"]
    return client_state


def whole_state_dict(engine: "DeepSpeedEngine", without_frozen: bool, *, on_first_only: bool = False) -> dict[str, Any]:
    """Return whole weights and buffers on the CPU, under all their names. All ranks call it.

    fp32 parameters are cast to the config's low precision, if it has one.

    Args:
        engine: the engine.
        without_frozen: whether to leave out frozen parameters.
        on_first_only: whether only the first rank retains the tensors.

    Raises:
        CheckpointError: a finite value overflows in the low precision.
    """
    state = wrap_state(engine.module)
    dtype = engine.policy.low_dtype or torch.float32
    ranks = RankGroup.for_saving(state.axes.whole)
    found: dict[str, Any] = {}
    overflows: dict[str, float] = {}
    for weight in find_weights(state.root):
        if without_frozen and weight.is_parameter and not weight.tensor.requires_grad:
            continue
        written = dtype if weight.is_parameter and weight.tensor.dtype == torch.float32 else weight.tensor.dtype
        whole = whole_weight(weight, state.mesh, weight.tensor.dtype)
        if (largest := overflow(whole, written)) is not None:
            overflows[weight.names[0]] = largest
        if ranks.rank == 0 or not on_first_only:
            on_cpu = whole.to("cpu", written)
            found |= dict.fromkeys(weight.names, on_cpu)
    refuse_overflows(overflows, dtype)
    return found


def guard_state_dict(module: nn.Module) -> None:
    """Make a script's `module.state_dict()` return whole tensors at stage 0, and raise if it would return shards.

    Scripts call it on one rank and write the result to a file. Calls by torch and zeroamp are not affected.
    """
    replace_method(module, "state_dict", partial(whole_or_error, wrap_state(module).plan.policy.stage))


def whole_or_error(
    stage: int, state_dict: Callable[..., dict[str, Any]], *, depth: int = 1
) -> Callable[..., dict[str, Any]]:
    """Wrap a `state_dict` method: it returns whole tensors at stage 0, and raises if it would return shards.

    Args:
        stage: ZeRO stage.
        state_dict: the method of a wrapped module, or of the engine around it.
        depth: frames from the returned function up to its caller. Calls by torch and zeroamp are not affected.
    """

    @wraps(state_dict)
    def checked(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = state_dict(*args, **kwargs)
        frame = inspect.currentframe()
        for _ in range(depth):
            frame = None if frame is None else frame.f_back
        caller = str(None if frame is None else frame.f_globals.get("__name__")).partition(".")[0]
        if caller in ("torch", "zeroamp") or not any(type(each) is DTensor for each in found.values()):
            return found
        if stage > 0:
            raise StepError(
                "state_dict of the engine or its module was called, but the parameters are sharded. Call "
                "engine.module_state_dict() or engine.save_16bit_model(folder) on all ranks, or the module's "
                "state_dict inside zero.GatheredParameters."
            )
        for name, each in found.items():
            found[name] = local_part(each)
        return found

    return checked


def save_weights(
    engine: "DeepSpeedEngine", folder: str | os.PathLike[str], file_name: str, without_frozen: bool
) -> bool:
    """Write whole weights to a file: see `DeepSpeedEngine.save_16bit_model`."""
    state_dict = whole_state_dict(engine, without_frozen, on_first_only=True)
    ranks = RankGroup.for_saving(wrap_state(engine.module).axes.whole)
    ranks.on_first(lambda: _write(Path(folder) / file_name, state_dict))
    return True


def _write(path: Path, state_dict: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        kept = {id(tensor): name for name, tensor in reversed(state_dict.items())}  # a shared tensor once
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items() if kept[id(tensor)] == name}, path)
    else:
        torch.save(state_dict, path)
