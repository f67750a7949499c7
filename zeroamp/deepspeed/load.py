"""`load_deepspeed_checkpoint`: loads a checkpoint of DeepSpeed's ZeRO into a wrapped model and its `TrainStep`."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroamp.deepspeed.contents import Contents, find, read_contents
from zeroamp.deepspeed.files import find_files
from zeroamp.deepspeed.layout import StoredTensor, fill, whole
from zeroamp.deepspeed.training import Training, plan_training
from zeroamp.policies.errors import CheckpointError, StepError, printable, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.training.step import TrainStep
from zeroamp.weights.model_weights import Weight, find_weights
from zeroamp.wrapping.state import WrapState, wrap_state

logger = logging.getLogger("zeroamp")
_Plan = tuple[list[tuple[torch.Tensor, StoredTensor]], Training | None, "DeepSpeedCheckpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedCheckpoint:
    """Facts about a checkpoint that `load_deepspeed_checkpoint` has loaded, and what it did not load."""

    path: Path
    """The folder of the tag."""
    zero_stage: int
    num_ranks: int
    """Number of ranks that wrote it."""
    version: str | None
    """Version of the DeepSpeed that wrote it."""
    global_steps: int
    """DeepSpeed's count of optimizer steps, skipped ones included."""
    skipped_steps: int
    lr_scheduler: dict[str, Any] | None
    """The saved state of its learning-rate scheduler."""
    client_state: dict[str, Any]
    """The argument of `engine.save_checkpoint(client_state=...)`."""
    not_loaded: tuple[str, ...]
    """State in the checkpoint that was not loaded into the model or `train`, in words."""


def load_deepspeed_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep | None = None,
    *,
    tag: str | None = None,
    load_lr_scheduler_states: bool = True,
) -> DeepSpeedCheckpoint:
    """Load a checkpoint of DeepSpeed's `engine.save_checkpoint` at ZeRO stage 0, 1, 2 or 3. All ranks call it.

    Parameters get the fp32 master weights; frozen parameters and buffers get the module's values. With `train`,
    torch.optim.Adam or AdamW also gets its moments and numbers of steps, and its param groups get lr, betas, eps and
    weight_decay. Step counters, loss scale and the scheduler of `scheduler_from_config` continue from DeepSpeed's.

    Stage and number of ranks may differ from those of the save. Files are mapped, and each rank copies its shards, so
    no rank holds the whole model. DeepSpeed is not needed, and no code in the pickles is run.

    Args:
        folder: the `save_dir` of DeepSpeed, which all ranks can read. It holds a folder per tag.
        model: a model that `wrap_model` returned.
        train: the `TrainStep` of `model`. None loads the model alone.
        tag: the checkpoint's folder in `folder`. None: the tag in the file `latest`.
        load_lr_scheduler_states: whether a scheduler of `scheduler_from_config` resumes from the state of DeepSpeed's.

    Raises:
        CheckpointError: on all ranks, before anything was changed. The text names the file that is missing, damaged or
            of an unsupported kind; the parameters that are missing, unexpected or of another shape; or the part of the
            optimizer state that does not fit.
        StepError: called inside an optimizer step of `train`.
        WrapError: `model` is not wrapped.
    """
    state = wrap_state(model)
    ranks = RankGroup.for_saving(state.axes.whole)
    plans: list[_Plan] = []
    ranks.run(lambda: plans.append(_plan(Path(folder), tag, state, train, load_lr_scheduler_states)))
    ((sources, training, loaded),) = plans

    def apply() -> None:
        for target, stored in sources:
            fill(target, stored)
        if training is not None:
            training.apply()

    ranks.run(apply)
    if ranks.rank == 0:
        logger.info("Loaded %s. Not loaded: %s.", loaded.path, printable("; ".join(loaded.not_loaded)) or "nothing")
    return loaded


def _plan(folder: Path, tag: str | None, state: WrapState, train: TrainStep | None, with_scheduler: bool) -> _Plan:
    """Check everything, and return what to load on this rank. Changes nothing."""
    if train is not None and (num_optimizers := len(train.optimizers)) != 1:
        raise StepError(
            f"load_deepspeed_checkpoint takes a TrainStep with one optimizer, but this one has {num_optimizers}. Load "
            "the model alone, without the TrainStep."
        )
    if train is not None and wrap_state(train.model) is not state:
        raise CheckpointError("train must be the TrainStep of `model`, but is of another model. Pass the right one.")
    files = find_files(folder, tag)
    contents = read_contents(files)
    weights = find_weights(state.root)
    sources = _sources(weights, contents, files.path)
    training = None if train is None else plan_training(train, weights, contents, files.path, with_scheduler)
    without_train = ["optimizer state, counters of steps, loss scale and scheduler (no train was given)"]
    left_out = contents.other_state + (without_train if training is None else training.not_loaded)
    loaded = DeepSpeedCheckpoint(
        path=files.path,
        zero_stage=contents.stage,
        num_ranks=contents.num_ranks,
        version=contents.version,
        global_steps=contents.global_steps,
        skipped_steps=contents.skipped_steps,
        lr_scheduler=contents.lr_scheduler,
        client_state=contents.client_state,
        not_loaded=tuple(left_out),
    )
    return sources, training, loaded


def _sources(weights: list[Weight], contents: Contents, path: Path) -> list[tuple[torch.Tensor, StoredTensor]]:
    """Return every parameter and persistent buffer of the model with its tensor in the checkpoint at `path`.

    Raises:
        CheckpointError: some are missing, unexpected, of another shape, or of a dtype that would lose bits.
    """
    stored = contents.parameters | {name: whole(buffer) for name, buffer in contents.buffers.items()}
    found = [(weight, find(weight.names, contents.aliases, stored)) for weight in weights]
    pairs = [(weight, names[0], stored[names[0]]) for weight, names in found if names]
    _refuse(
        path,
        {
            "missing": [weight.names[0] for weight, names in found if not names],
            "unexpected": sorted(stored.keys() - {name for _, names in found for name in names}),
            "stored apart, but shared in the model": [" and ".join(names) for _, names in found if len(names) > 1],
            "of another shape": [
                f"{name} {source.shape} instead of {tuple(weight.tensor.shape)}"
                for weight, name, source in pairs
                if source.shape != tuple(weight.tensor.shape)
            ],
            "of a dtype that would lose bits": [
                f"{name} {source.dtype} into {weight.tensor.dtype}"
                for weight, name, source in pairs
                if weight.is_parameter
                and source.numel
                and torch.promote_types(weight.tensor.dtype, source.dtype) != weight.tensor.dtype
            ],
        },
    )
    return [(weight.tensor, source) for weight, _, source in pairs]


def _refuse(path: Path, problems: dict[str, list[str]]) -> None:
    texts = [f"{len(names)} {kind}: {some_of(names)}" for kind, names in problems.items() if names]
    if texts:
        raise CheckpointError(
            f"{path} must have each parameter and buffer of the model once, but has {'; '.join(texts)}. Build "
            "the model that was trained, with the same parameters shared; save without exclude_frozen_parameters."
        )
