"""`load_deepspeed_checkpoint`: from a checkpoint of DeepSpeed's ZeRO into a wrapped model and its `TrainStep`."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroamp.deepspeed.contents import Contents, read_contents
from zeroamp.deepspeed.files import find_files
from zeroamp.deepspeed.layout import StoredTensor
from zeroamp.deepspeed.shards import fill, sources_of
from zeroamp.deepspeed.training import Training, plan_training
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.training.step import TrainStep
from zeroamp.weights.model_weights import find_weights
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import WrapState, wrap_state

logger = logging.getLogger("zeroamp")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedCheckpoint:
    """What `load_deepspeed_checkpoint` read, and what of it was not taken over."""

    path: Path
    """The folder of the tag."""
    zero_stage: int
    num_ranks: int
    """That wrote it."""
    version: str | None
    """Of the DeepSpeed that wrote it."""
    global_steps: int
    """DeepSpeed's count of optimizer steps, skipped ones included."""
    skipped_steps: int
    lr_scheduler: dict[str, Any] | None
    """The state of its learning-rate scheduler, as it was saved."""
    client_state: dict[str, Any]
    """What `engine.save_checkpoint(client_state=...)` was given."""
    not_loaded: tuple[str, ...]
    """What is in the checkpoint and was not taken over, or only returned here."""


def load_deepspeed_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, train: TrainStep | None = None, *, tag: str | None = None
) -> DeepSpeedCheckpoint:
    """Load what DeepSpeed's `engine.save_checkpoint(folder)` wrote at ZeRO stage 0, 1, 2 or 3. All ranks call it.

    Parameters get the fp32 master weights; frozen ones and buffers what the module had. With `train`, torch.optim.Adam
    or AdamW also gets its moments and numbers of steps, and its param groups lr, betas, eps and weight_decay; the step
    counters, the loss scale and the scheduler of `scheduler_from_config` go on where DeepSpeed's stopped.

    The ranks and stage that wrote it need not be those that read it. Files are mapped, and each rank copies its shards,
    so that none holds a full model. DeepSpeed is not needed, and pickles are read with `torch.load(weights_only=True)`:
    nothing in them is run.

    Args:
        folder: the folder that DeepSpeed was given, which all ranks can read; it holds a folder per tag.
        model: what `wrap_model` returned.
        train: a step around `model`; None leaves the optimizer and all else as it is.
        tag: which checkpoint; None is the one that the file `latest` names.

    Raises:
        CheckpointError: on all ranks, before anything was changed. The text names the file that is missing, damaged or
            of a kind that is refused, the parameters that are missing, unexpected or of another shape, or what of the
            optimizer does not fit.
        StepError: `train` is inside an accumulation window.
        WrapError: `model` is not wrapped.
    """
    state = wrap_state(model)
    ranks = RankGroup.for_saving(state.mesh)
    plans: list[_Plan] = []
    ranks.run(lambda: plans.append(_plan(Path(folder), tag, state, train)))
    (plan,) = plans
    ranks.run(plan.apply)
    if ranks.rank == 0:
        not_loaded = "; ".join(plan.loaded.not_loaded) or "nothing"
        logger.info("%s: loaded; not taken over: %s", plan.loaded.path, not_loaded)
    return plan.loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """All that will be done on this rank, checked; nothing has been changed yet."""

    sources: list[tuple[torch.Tensor, StoredTensor]]
    training: Training | None
    loaded: DeepSpeedCheckpoint

    def apply(self) -> None:
        for target, stored in self.sources:
            fill(target, stored)
        if self.training is not None:
            self.training.apply()


def _plan(folder: Path, tag: str | None, state: WrapState, train: TrainStep | None) -> _Plan:
    if train is not None and wrap_state(train.model) is not state:
        raise CheckpointError(describe("train", "a step around another model", "one around `model`", "Pass that one."))
    files = find_files(folder, tag)
    contents = read_contents(files)
    weights = find_weights(state.root)
    sources = sources_of(weights, contents)
    training = None if train is None else plan_training(train, weights, contents, files.path)
    return _Plan(sources=sources, training=training, loaded=_report(files.path, contents, training))


def _report(path: Path, contents: Contents, training: Training | None) -> DeepSpeedCheckpoint:
    without_train = ["optimizer state, counters of steps, loss scale and scheduler (no train was given)"]
    left_out = contents.other_state + (without_train if training is None else training.not_loaded)
    return DeepSpeedCheckpoint(
        path=path,
        zero_stage=contents.stage,
        num_ranks=contents.num_ranks,
        version=contents.version,
        global_steps=contents.global_steps,
        skipped_steps=contents.skipped_steps,
        lr_scheduler=contents.lr_scheduler,
        client_state=contents.client_state,
        not_loaded=tuple(left_out),
    )
