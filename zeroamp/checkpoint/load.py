"""`load_checkpoint`: the newest checkpoint that is whole, into a model, optimizer, scheduler and random generators."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from zeroamp.agreement import Agreement
from zeroamp.checkpoint.folder import find_checkpoints, is_checkpoint
from zeroamp.checkpoint.manifest import DamagedCheckpointError, Manifest, check_file, read_manifest
from zeroamp.checkpoint.random_state import set_random_state
from zeroamp.checkpoint.reader import SafeReader
from zeroamp.checkpoint.save import VALUES, rank_file
from zeroamp.checkpoint.state import (
    MODEL,
    check_model_fits,
    check_optimizer_fits,
    load_optimizer,
    model_tensors,
    optimizer_targets,
)
from zeroamp.mesh import device_of
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.state import WrapState, agreement_of, reshard, wrap_state
from zeroamp.step import TrainStep
from zeroamp.step_checks import StatefulScheduler

logger = logging.getLogger("zeroamp")


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep | None = None,
    *,
    missing_ok: bool = False,
    extra_rank: int | None = None,
) -> Any:
    """Load what `save_checkpoint` wrote, and return this rank's `extra`. Every rank calls this.

    Stage, number of ranks, mesh, groups and dtypes on the wire may be others than when it was saved: tensors are
    resharded. Every file is checked against its digest first, each by one rank.

    With the same number of ranks, training goes on bit for bit. With another one, random generators are left as they
    are, buffers that differed between ranks become the first rank's, and both are logged.

    Args:
        folder: of a run, where a damaged checkpoint is logged and the one before it taken; or one checkpoint.
        model: what `wrap_model` returned.
        train: its training step, at the end of an accumulation window. None loads the model alone.
        missing_ok: return None where there is no checkpoint; one that is damaged is an error in any case.
        extra_rank: the rank whose `extra` is returned; None: this rank's own.

    Raises:
        CheckpointError: on all ranks: there is none, none is whole, or parameters, shapes, dtypes, optimizer or
            scheduler are not those of the checkpoint, which names the difference. Nothing has been changed then.
        StepError: inside an accumulation window, or the loss scale is of another kind.
    """
    state = wrap_state(model)
    state.saving.wait()
    if train is not None:
        train.state_dict()  # refuses an unfinished window
    ranks = agreement_of(state)
    found = _find(Path(folder), ranks)
    if found is None:
        if missing_ok:
            return None
        raise CheckpointError(
            describe(os.fspath(folder), "no checkpoint", "what save_checkpoint wrote", "Check the path.")
        )
    path, manifest = found
    loading = _Load(path, manifest, state, train, ranks)
    ranks.run(lambda: loading.prepare(extra_rank))
    ranks.run(loading.read_tensors)
    ranks.run(loading.finish)
    if ranks.rank == 0:
        logger.info("loaded %s", path)
    return loading.extra


def _find(folder: Path, ranks: Agreement) -> tuple[Path, Manifest] | None:
    """Return the checkpoint to load, whole, and its manifest; None where there is none at all."""
    candidates = ranks.on_first(lambda: [folder] if is_checkpoint(folder) else find_checkpoints(folder))
    damages = []
    for path in candidates:
        try:
            manifest = ranks.on_first(partial(read_manifest, path))
            _check_files(path, manifest, ranks)
        except DamagedCheckpointError as error:
            damages.append(str(error))
            if ranks.rank == 0:
                logger.warning("%s is not loaded: %s", path, error)
        else:
            return path, manifest
    if damages:
        raise DamagedCheckpointError("; ".join(damages))
    return None


def _check_files(path: Path, manifest: Manifest, ranks: Agreement) -> None:
    names = sorted(manifest.files)

    def check_share() -> None:
        for name in names[ranks.rank :: ranks.num_ranks]:
            check_file(path / name, manifest.files[name])

    ranks.run(check_share)


class _Load:
    """One checkpoint on its way into a model."""

    def __init__(
        self, path: Path, manifest: Manifest, state: WrapState, train: TrainStep | None, ranks: Agreement
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.state = state
        self.train = train
        self.ranks = ranks
        self.is_same_size = manifest.world_size == ranks.num_ranks
        self.extra: Any = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self.own: dict[str, Any] = {}

    def prepare(self, extra_rank: int | None) -> None:
        """Read all but the tensors, compare, and say where the tensors go. Changes nothing but the step counts."""
        reshard(self.state.root.modules())
        metadata = SafeReader(self.path).read_metadata()
        self.tensors = model_tensors(self.state.root)
        check_model_fits(self.tensors, metadata, str(self.path))
        self.values = self._read(VALUES)
        self.own = self._read(rank_file(self.ranks.rank if self.is_same_size else 0))
        self.extra = self._extra_of(extra_rank)
        if self.train is not None:
            self._check_training(self.train)
            parameters = {name.removeprefix(MODEL): tensor for name, tensor in self.tensors.items()}
            self.tensors |= optimizer_targets(self.values["optimizer"], parameters, metadata)
            self.train.load_state_dict(self.values["train"])  # refuses another kind of loss scale

    def _read(self, name: str) -> Any:
        return torch.load(self.path / name, map_location="cpu", weights_only=True)

    def _check_training(self, train: TrainStep) -> None:
        where = str(self.path)
        check_optimizer_fits(train.optimizer, self.values["optimizer"], self.state.root, where)
        saved, ours = (scheduler is not None for scheduler in (self.values["scheduler"], train.scheduler))
        if saved != ours:
            names = {True: "a scheduler", False: "no scheduler"}
            raise CheckpointError(
                describe(where, names[saved], f"{names[ours]}, as TrainStep has", "Build TrainStep as it was.")
            )
        differing = [name for name in self.own["tensors"] if not name.startswith(MODEL)]
        if differing and not self.is_same_size:
            raise CheckpointError(
                describe(
                    where,
                    f"optimizer state that is each rank's own ({differing[0]}), of {self.manifest.world_size} ranks",
                    f"the same number of ranks, not {self.ranks.num_ranks}",
                    "Start as many, or load the model alone: load_checkpoint(folder, model).",
                )
            )

    def read_tensors(self) -> None:
        """Read each rank's part of every tensor into place."""
        load(self.tensors, storage_reader=SafeReader(self.path), process_group=self.ranks.group)

    def finish(self) -> None:
        """Put the rest in place."""
        if self.is_same_size:
            for name in self.own["tensors"].keys() & self.tensors.keys():
                self.tensors[name].copy_(self.own["tensors"][name])
        if self.own["extra_states"]:
            self.state.root.load_state_dict(self.own["extra_states"], strict=False)
        if self.train is not None:
            self._finish_training(self.train)

    def _finish_training(self, train: TrainStep) -> None:
        load_optimizer(train.optimizer, self.values["optimizer"], self.tensors, self.state.root)
        if isinstance(train.scheduler, StatefulScheduler):
            train.scheduler.load_state_dict(self.values["scheduler"])
        self.state.saving.run = self.manifest.run
        if self.is_same_size:
            set_random_state(self.own["random"], device_of(self.state.mesh))
        elif self.ranks.rank == 0:
            logger.warning(
                "%s is of %d ranks, now there are %d: random generators stay as they are, and buffers that differed "
                "between ranks (%s) become the first rank's",
                self.path,
                self.manifest.world_size,
                self.ranks.num_ranks,
                ", ".join(self.own["tensors"]) or "none",
            )

    def _extra_of(self, rank: int | None) -> Any:
        """Return the `extra` of one rank; with None, this rank's own, or what all have, if their number changed."""
        if rank is not None or self.is_same_size:
            return self._read(rank_file(self.ranks.rank if rank is None else rank))["extra"]
        first, *others = (self._read(rank_file(number))["extra"] for number in range(self.manifest.world_size))
        if not all(_equal(first, other) for other in others):
            raise CheckpointError(
                describe(
                    f"{self.path}, extra",
                    f"values that differ between the {self.manifest.world_size} ranks that saved it",
                    f"the same on all, for {self.ranks.num_ranks} ranks",
                    "Choose one with extra_rank, or save what does not depend on the rank.",
                )
            )
        return first


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
