"""`load_checkpoint`: the newest checkpoint that is whole, into a model, optimizer, scheduler and random generators."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from zeroamp.checkpoint.files import VALUES, rank_file
from zeroamp.checkpoint.folder import find_checkpoints, is_checkpoint, is_checkpoint_name
from zeroamp.checkpoint.manifest import DamagedCheckpointError, Manifest, check_file, read_manifest
from zeroamp.checkpoint.optimizer_state import check_optimizer_fits, load_optimizer, optimizer_targets
from zeroamp.checkpoint.reader import SafeReader
from zeroamp.checkpoint.state import MODEL, check_model_fits, load_extra_states, model_tensors
from zeroamp.hooks.random_state import set_random_state
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.training.checks import StatefulScheduler
from zeroamp.training.step import TrainStep
from zeroamp.weights.files import MANIFEST
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import WrapState, reshard, wrap_state


def extra_of(rank: int, saved_by: int, read: Callable[[int], Any], where: str) -> Any:
    """Return what the chosen `rank` saved, of the `saved_by` ranks that did.

    Raises:
        CheckpointError: there was no such rank.
    """
    if not 0 <= rank < saved_by:
        raise CheckpointError(describe("extra_rank", rank, f"0 to {saved_by - 1}, the ranks of {where}", "Change it."))
    return read(rank)


def common_extra(num_ranks: int, saved_by: int, read: Callable[[int], Any], where: str) -> Any:
    """Return what all `saved_by` ranks saved alike, for `num_ranks` ranks that load it.

    Raises:
        CheckpointError: it was not the same.
    """
    first, *others = map(read, range(saved_by))
    if not all(_equal(first, other) for other in others):
        raise CheckpointError(
            describe(
                f"{where}, extra",
                f"values that differ between the {saved_by} ranks that saved it",
                f"the same on all, for {num_ranks} ranks",
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
    are, buffers and modules' extra states that differed between ranks become the first rank's, and that is logged.

    Args:
        folder: of a run, where a damaged checkpoint is logged and the one before it taken; or one checkpoint.
        model: what `wrap_model` returned.
        train: its training step, at the end of an accumulation window. None loads the model alone.
        missing_ok: return None where there is no checkpoint; one that is damaged is an error in any case.
        extra_rank: the rank whose `extra` is returned; None: this rank's own.

    Raises:
        CheckpointError: on all ranks. With nothing changed: there is none, none is whole, or parameters, shapes,
            dtypes, optimizer or scheduler are others. With the model filled in part: a file cannot be read through.
        StepError: inside an accumulation window, or the loss scale is of another kind.
    """
    state = wrap_state(model)
    state.saving.abandon()
    if train is not None:
        train.state_dict()  # refuses an unfinished window
    ranks = RankGroup.for_saving(state.mesh)
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
    ranks.run(loading.load_counts)
    ranks.run(loading.read_tensors)
    ranks.run(loading.finish)
    if ranks.rank == 0:
        logger.info("loaded %s", path)
    return loading.extra


def _find(folder: Path, ranks: RankGroup) -> tuple[Path, Manifest] | None:
    """Return the checkpoint to load, whole, and its manifest; None where there is none at all."""
    candidates = ranks.on_first(lambda: _candidates(folder))
    damages = []
    for index, path in enumerate(candidates):
        try:
            manifest = ranks.on_first(partial(read_manifest, path))
            _check_files(path, manifest, ranks)
        except DamagedCheckpointError as error:
            damages.append(str(error))
            if ranks.rank == 0:
                _log_damage(path, error)
        else:
            if ranks.rank == 0:
                _log_unreadable(candidates[index + 1 :])
            return path, manifest
    if damages:
        raise DamagedCheckpointError("; ".join(damages))
    return None


def _log_damage(path: Path, error: CheckpointError) -> None:
    logger.warning("%s is not loaded: %s", path, error)


def _log_unreadable(paths: list[Path]) -> None:
    """Log which checkpoints nobody can say the age of: one of them might have been the newest."""
    for path in paths:
        try:
            read_manifest(path)
        except DamagedCheckpointError as error:
            _log_damage(path, error)
        except CheckpointError:  # of a newer format, so its age is known
            continue


def _candidates(folder: Path) -> list[Path]:
    if is_checkpoint(folder):
        return [folder]
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(describe(str(folder), "a file", "a checkpoint, or a folder of them", "Check the path."))
    if is_checkpoint_name(folder.name) and not folder.exists():
        raise CheckpointError(describe(str(folder), "nothing", "a checkpoint", "Check the path."))
    return find_checkpoints(folder)


def _check_files(path: Path, manifest: Manifest, ranks: RankGroup) -> None:
    names = sorted(manifest.files)

    def check_share() -> None:
        for name in names[ranks.rank :: ranks.num_ranks]:
            check_file(path / name, manifest.files[name])

    ranks.run(check_share)


class _Load:
    """One checkpoint on its way into a model."""

    def __init__(
        self, path: Path, manifest: Manifest, state: WrapState, train: TrainStep | None, ranks: RankGroup
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
        """Read all but the tensors, compare, and say where the tensors go. Changes nothing."""
        reshard(self.state.root.modules())
        metadata = SafeReader(self.path).read_metadata()
        self._refuse_unlisted(metadata)
        self.values = self._read(VALUES)
        self.own = self._read(rank_file(self.ranks.rank if self.is_same_size else 0))
        check_model_fits(self.state.root, metadata, self.own["extra_states"], str(self.path))
        self.tensors = model_tensors(self.state.root)
        self.extra = self._extra(extra_rank)
        if self.train is not None:
            self._check_training(self.train)
            parameters = {name.removeprefix(MODEL): tensor for name, tensor in self.tensors.items()}
            self.tensors |= optimizer_targets(self.values["optimizer"], parameters, metadata, self.own["tensors"])

    def load_counts(self) -> None:
        """Put step counts and loss scale in place; all ranks refuse another kind of scale, or none does."""
        if self.train is not None:
            self.train.load_state_dict(self.values["train"])

    def _refuse_unlisted(self, metadata: Metadata) -> None:
        """Raise unless the files that the metadata sends the reader to have been checked."""
        for info in (metadata.storage_data or {}).values():
            self._check_listed(info.relative_path)

    def _check_listed(self, name: str) -> None:
        if name not in self.manifest.files:
            found = f"no record of {name}"
            raise CheckpointError(describe(str(self.path / MANIFEST), found, "one of every file", "Load another one."))

    def _read(self, name: str) -> Any:
        self._check_listed(name)
        return torch.load(self.path / name, map_location="cpu", weights_only=True)

    def _check_training(self, train: TrainStep) -> None:
        where = str(self.path)
        check_optimizer_fits(train.optimizer, self.values["optimizer"], self.state.root, where)
        saved = "no scheduler" if self.values["scheduler"] is None else self.values["scheduler"]["class"]
        ours = "no scheduler" if train.scheduler is None else type(train.scheduler).__name__
        if saved != ours:
            raise CheckpointError(describe(where, saved, f"{ours}, as TrainStep has", "Build TrainStep as it was."))
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
        for name, tensor in self.own["tensors"].items():
            if name.startswith(MODEL):
                self.tensors[name].copy_(tensor)
            else:
                self.tensors[name] = tensor
        load_extra_states(self.state.root, self.own["extra_states"])
        if self.train is not None:
            self._finish_training(self.train)
        if not self.is_same_size and self.ranks.rank == 0:
            logger.warning(
                "%s is of %d ranks, now there are %d: random generators stay as they are, and buffers that differed "
                "between ranks (%s) become the first rank's",
                self.path,
                self.manifest.world_size,
                self.ranks.num_ranks,
                ", ".join(name.removeprefix(MODEL) for name in self.own["tensors"]) or "none",
            )

    def _finish_training(self, train: TrainStep) -> None:
        load_optimizer(train.optimizer, self.values["optimizer"], self.tensors, self.state.root)
        if isinstance(train.scheduler, StatefulScheduler):
            train.scheduler.load_state_dict(self.values["scheduler"]["state"])
        self.state.saving.run, self.state.saving.serial = self.manifest.run, self.manifest.serial
        if self.is_same_size:
            set_random_state(self.own["random"], device_of(self.state.mesh))

    def _extra(self, rank: int | None) -> Any:
        """Return the `extra` of one rank; with None, this rank's own, or what all have, if their number changed."""
        saved_by, where = self.manifest.world_size, str(self.path)

        def read(number: int) -> Any:
            return self._read(rank_file(number))["extra"]

        if rank is None and not self.is_same_size:
            return common_extra(self.ranks.num_ranks, saved_by, read, where)
        return extra_of(self.ranks.rank if rank is None else rank, saved_by, read, where)
