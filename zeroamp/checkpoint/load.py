"""`load_checkpoint`: loads the newest undamaged checkpoint into model, optimizers, schedulers and random generators."""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.folder import find_checkpoints, is_checkpoint, is_checkpoint_name
from zeroamp.checkpoint.half_loaded import marked, readable, refuse_other_parts, state_of
from zeroamp.checkpoint.manifest import (
    VALUES,
    DamagedCheckpointError,
    Layout,
    Manifest,
    RemovedCheckpointError,
    check_file,
    rank_file,
    read_manifest,
)
from zeroamp.checkpoint.model_state import (
    MODEL,
    check_model_fits,
    load_extra_states,
    model_tensors,
    state_by_name,
)
from zeroamp.checkpoint.optimizer_state import (
    check_optimizer_fits,
    class_name,
    is_class_name,
    load_optimizer,
    optimizer_targets,
)
from zeroamp.checkpoint.save import refuse_other_train, run_of_root, wait_for_save
from zeroamp.checkpoint.tensors import read_tensors, read_values
from zeroamp.hooks.random_state import set_random_state
from zeroamp.host_memory.storages import put_state_away
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import CheckpointError, ZeroAmpError, describe, some_of
from zeroamp.policies.numbers import is_integer
from zeroamp.rank_group import RankGroup
from zeroamp.training.refused_arguments import StatefulScheduler
from zeroamp.training.step import TrainStep, step_of
from zeroamp.wrapping.state import WrapState, refuse_single_part, reshard

logger = logging.getLogger("zeroamp")
_PATH = "Check the path."
_OTHER = "Load another checkpoint."
_NUM_LISTINGS = 5
"""How often a folder is listed again, because a save removed the checkpoint that was read."""


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep | None = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    missing_ok: bool = False,
    extra_rank: int | None = None,
) -> dict[str, Any] | None:
    """Load a checkpoint of `save_checkpoint`, and return this rank's `extra`. All ranks call it.

    Stage, number of ranks, mesh, groups and communication dtypes may differ from those of the save: tensors are
    resharded. Every file is first checked against its digest, each by one rank.

    With the same number of ranks, training continues with the same bits. With another number, random generators keep
    their state, and `extra`, buffers and extra states of modules are the first rank's. A warning is logged.

    Args:
        folder: one checkpoint, or a run's folder of checkpoints. In a folder, damaged checkpoints are logged, and the
            newest undamaged one is loaded.
        model: a model that `wrap_model` returned.
        train: the model's `TrainStep`, between two optimizer steps. None loads only the model, and leaves step counts,
            loss scale and random states as they are.
        load_optimizer_states: if False, the optimizer's state is not loaded, and its class and param groups may differ
            from the saved ones. Step counts, loss scale and random states are loaded anyway.
        load_lr_scheduler_states: if False, the scheduler's state is not loaded, and there may be another scheduler or
            none. If the scheduler's state is loaded without the optimizer's, the optimizer gets its learning rates.
        missing_ok: return None if there is no checkpoint. If all checkpoints are damaged, an error is raised anyway.
        extra_rank: the rank whose `extra` is returned. None: this rank, or the first if the number of ranks changed.

    Raises:
        CheckpointError: on all ranks. Before anything is changed: there is no checkpoint, all are damaged,
            parameters, shapes, dtypes, optimizer or scheduler differ from the saved ones, or the last background save
            failed. After some tensors were loaded: a file cannot be read to its end. Then whatever reads or trains the
            model raises, until a load succeeds.
        StepError: called inside an optimizer step, or the config has another kind of loss scale.
    """
    state = state_of(model)
    refuse_single_part(state, "load_checkpoint")
    wait_for_save(model)
    if train is not None:
        refuse_other_train("load_checkpoint", train)
        train.state_dict()  # raises inside an optimizer step
    ranks = RankGroup.for_saving(state.axes.whole, "load_checkpoint")
    arguments = {
        "folder": os.fspath(folder), "train": "a TrainStep" if train else None, "missing_ok": missing_ok,
        "load_optimizer_states": load_optimizer_states, "load_lr_scheduler_states": load_lr_scheduler_states,
    }  # fmt: skip
    ranks.refuse_different("load_checkpoint", lambda: arguments)
    of_training = {"step counts": True, "optimizers": load_optimizer_states, "schedulers": load_lr_scheduler_states}
    parts = {"the model", *(part for part, is_loaded in of_training.items() if is_loaded and train is not None)}
    ranks.run(lambda: refuse_other_parts(state, parts))
    found = _find(Path(folder), ranks)
    if found is None:
        if missing_ok:
            return None
        raise CheckpointError(f"{os.fspath(folder)} holds no checkpoint that save_checkpoint wrote. {_PATH}")
    path, manifest = found
    loading = _Load(path, manifest, state, train, ranks, parts)
    with readable(state):
        if state.axes.is_joined:
            of_ranks = ranks.run(lambda: [*chain(*state_by_name(state.root))])
            loading.names_elsewhere = frozenset(chain(*of_ranks)) - {*of_ranks[ranks.rank]}
        ranks.run(lambda: loading.prepare(extra_rank))
    with marked(state, parts, step_of(train).recover if train is not None and "optimizers" in parts else None):
        ranks.run(loading.load_counts)
        ranks.run(loading.read_tensors)
        ranks.run(loading.finish)
    if ranks.rank == 0:
        logger.info("Loaded %s.", path)
    return loading.extra


def _find(folder: Path, ranks: RankGroup) -> tuple[Path, Manifest] | None:
    """Return the first undamaged checkpoint and its manifest, or None if the folder has no checkpoint.

    Raises:
        DamagedCheckpointError: all checkpoints are damaged.
    """
    for _ in range(_NUM_LISTINGS):
        candidates, errors = ranks.on_first(lambda: _candidates(folder)), []
        for path in candidates:
            try:
                manifest = ranks.on_first(partial(read_manifest, path))
                ranks.run(partial(_check_share, path, manifest, ranks))
            except DamagedCheckpointError as error:
                errors.append(error)
                if ranks.rank == 0:
                    logger.warning("%s is not loaded: %s", path, error)
            else:
                return path, manifest
        is_removed = any(isinstance(error, RemovedCheckpointError) for error in errors)
        if not is_removed or candidates == [folder]:
            break
    if errors:
        raise (errors[0] if len(errors) == 1 else DamagedCheckpointError("; ".join(map(str, errors))))
    return None


def _candidates(folder: Path) -> list[Path]:
    if is_checkpoint(folder):
        return [folder]
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(describe(str(folder), "a file", "a checkpoint or a folder of checkpoints", _PATH))
    if is_checkpoint_name(folder.name) and not folder.exists():
        raise CheckpointError(f"{folder} must be a checkpoint, but does not exist. {_PATH}")
    return find_checkpoints(folder)


def _check_share(path: Path, manifest: Manifest, ranks: RankGroup) -> None:
    for name in sorted(manifest.files)[ranks.rank :: ranks.num_ranks]:
        check_file(path / name, manifest.files[name])


@dataclass(slots=True)
class _Load:
    """Loads one checkpoint, in four steps. Each runs in `RankGroup.run`, which raises an error of one rank on all."""

    path: Path
    manifest: Manifest
    state: WrapState
    train: TrainStep | None
    ranks: RankGroup
    parts: Collection[str]
    """What is loaded: the model, and parts of a training."""
    extra: dict[str, Any] | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors to load, by name in the checkpoint."""
    values: dict[str, Any] = field(default_factory=dict)
    """The values that are the same on all ranks."""
    own: dict[str, Any] = field(default_factory=dict)
    """This rank's values."""
    names_elsewhere: frozenset[str] = frozenset()
    """The names of parameters, buffers and extra states of other ranks, beside a pipeline."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """Name of a tensor -> where its values are."""
    is_same_size: bool = False
    """Whether as many ranks load as have saved, each with the parts that it had."""

    def prepare(self, extra_rank: int | None) -> None:
        """Read everything but tensors, compare it with the model, and collect the tensors to load. Changes nothing.

        Raises:
            CheckpointError: the checkpoint does not fit, or holds other values than a save writes.
        """
        try:
            self._prepare(extra_rank)
        except ZeroAmpError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} must hold the values that save_checkpoint writes, but {VALUES} or a file of a rank holds "
                f"others ({type(error).__name__}: {error}). Load another checkpoint."
            ) from error

    def _prepare(self, extra_rank: int | None) -> None:
        reshard(self.state.root.modules())
        self.values, self.layouts = read_values(self.path / VALUES), self.manifest.tensors
        if not self.state.axes.is_joined:
            self._read_own(parts=None)
        else:
            from zeroamp.pipelines.checkpoint import own_share, parts_of

            self._read_own(parts_of(self.state.root))
            shared = self.own, self.values, self.layouts, self._is_elsewhere
            self.own, self.values, self.layouts = own_share(*shared)
        if extra_rank is not None and not 0 <= extra_rank < self.manifest.world_size:
            raise CheckpointError(
                f"extra_rank must be one of the {self.manifest.world_size} ranks that wrote {self.path}, from 0 on, "
                f"but is {extra_rank}."
            )
        excluded = self.values["excluded"]
        check_model_fits(self.state.root, self.layouts, self.own, str(self.path), excluded)
        self.tensors = model_tensors(self.state.root, excluded)
        self.extra = (self.own if extra_rank is None else read_values(self.path / rank_file(extra_rank)))["extra"]
        if self.train is not None:
            self._check_training(self.train)
        if "optimizers" in self.parts:
            for description in self.values["optimizers"]:
                self.tensors |= optimizer_targets(description, self.tensors, self.layouts)
        if unread := [name for name in self.tensors if name not in self.layouts and not self._is_own(name)]:
            raise CheckpointError(f"{self.path} has no values of {some_of(unread, 5)}. Load another checkpoint.")

    def _read_own(self, parts: list[str] | None) -> None:
        """Read this rank's values, or those of the first rank if other ranks have saved, or with other `parts`."""
        if self.manifest.world_size == self.ranks.num_ranks:
            self.own = read_values(self.path / rank_file(self.ranks.rank))
            self.is_same_size = self.own.get("parts") == parts
        if not self.is_same_size:
            self.own = read_values(self.path / rank_file(0))

    def load_counts(self) -> None:
        """Load step counts and loss scale. Raise StepError if the config has another kind of loss scale."""
        if self.train is not None:
            self.train.load_state_dict(self.values["train"])

    def _check_training(self, train: TrainStep) -> None:
        where, descriptions, counts = str(self.path), self.values["optimizers"], self.values["train"]
        for key in ("num_steps", "num_skipped"):
            if not is_integer(counts[key], at_least=0):
                raise CheckpointError(describe(f"{key} in {where}", repr(counts[key]), "an integer >= 0", _OTHER))
        if len(descriptions) != len(train.optimizers):
            count = f"{len(descriptions)} optimizer{'s' * (len(descriptions) > 1)}"
            raise CheckpointError(
                f"{where} was saved with {count}, but TrainStep has {len(train.optimizers)}. Build TrainStep with as "
                "many, or load the model alone: load_checkpoint(folder, model)."
            )
        for index, optimizer in enumerate(train.optimizers):
            name = "the optimizer" if len(descriptions) == 1 else f"optimizer {index}"
            if "optimizers" in self.parts:
                check_optimizer_fits(optimizer, descriptions[index], self.state.root, where, name)
            saved, scheduler = self.values["schedulers"][index], train.schedulers[index]
            was = "no scheduler" if saved is None else saved["class"]
            ours = "no scheduler" if scheduler is None else class_name(scheduler)
            if "schedulers" in self.parts and not is_class_name(was, ours):
                raise CheckpointError(
                    f"{where} was saved with {was}, but {name} of TrainStep has {ours}. Build TrainStep with the saved "
                    "kind of scheduler, or leave its state out: load_checkpoint(..., load_lr_scheduler_states=False)."
                )

    def read_tensors(self) -> None:
        """Read this rank's part of every tensor into `tensors`: the model's own, and new ones for the optimizers."""
        tensors = {name: each for name, each in self.tensors.items() if not self._is_own(name)}
        read_tensors(tensors, self.layouts, self.path)

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether a name, of the model or of the checkpoint, is that of another rank's part."""
        return name.removeprefix(MODEL) in self.names_elsewhere

    def _is_own(self, name: str) -> bool:
        """Return whether a tensor is read from a rank's file: it is sharded neither here nor in the save."""
        return name in self.own["tensors"] and not isinstance(self.tensors[name], DTensor)

    def finish(self) -> None:
        """Load this rank's own tensors, extra states, optimizers, schedulers and random states."""
        for name, tensor in self.own["tensors"].items():
            if self._is_own(name):
                self.tensors[name].copy_(tensor)
        load_extra_states(self.state.root, self.own["extra_states"])
        if self.train is not None:
            self._finish_training(self.train)
        if not self.is_same_size and self.ranks.rank == 0:
            logger.warning(
                "%s was saved by %d ranks and loaded by %d: random generators keep their state, and buffers and "
                "`extra` are the first rank's on all ranks.",
                self.path,
                self.manifest.world_size,
                self.ranks.num_ranks,
            )

    def _finish_training(self, train: TrainStep) -> None:
        if "optimizers" in self.parts:
            states = zip(train.optimizers, self.values["optimizers"], self.own["optimizers"], strict=True)
            for optimizer, description, own in states:
                load_optimizer(optimizer, description, self.tensors, own, self.state.root)
                put_state_away(optimizer)
        pairs = zip(train.optimizers, train.schedulers, self.values["schedulers"], strict=True)
        for optimizer, scheduler, saved in pairs:
            if "schedulers" in self.parts and isinstance(scheduler, StatefulScheduler):
                scheduler.load_state_dict(saved["state"])
                if "optimizers" not in self.parts:
                    _set_learning_rates(optimizer, scheduler)
        run_of_root[self.state.root] = self.manifest.run
        if self.is_same_size:
            set_random_state(self.own["random"], device_of(self.state.mesh))


def _set_learning_rates(optimizer: torch.optim.Optimizer, scheduler: object) -> None:
    """Set the learning rates of an optimizer whose state was not loaded: schedulers compute the next from them."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
