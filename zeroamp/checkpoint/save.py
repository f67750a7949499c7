"""`save_checkpoint`: a snapshot of training, written by all ranks and published by one rename.

    snapshot   plain values and random states as bytes, tensors by name (copied to CPU memory for a background save)
    draft      the first rank creates an empty folder
    write      each rank writes its shards (see `tensors`) and its own file to the disk (fsync), and computes digests
    publish    the first rank writes the manifest and `latest`, renames the draft, and removes old checkpoints

Each line runs in a `RankGroup`: an error of one rank is raised on all ranks, and the draft is removed. Of values that
must be equal on all ranks, the ranks exchange digests, and the values only if digests differ.
"""

import io
import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.background import saving_of
from zeroamp.checkpoint.export import export_files
from zeroamp.checkpoint.folder import Draft, is_checkpoint_name, open_draft
from zeroamp.checkpoint.manifest import VALUES, FileRecord, Manifest, rank_file, record_content, refuse_other_size
from zeroamp.checkpoint.model_state import callback_tensors, extra_states, frozen_names, model_tensors, shard_dims
from zeroamp.checkpoint.optimizer_state import OPTIMIZER, is_subclass, optimizer_state
from zeroamp.checkpoint.reader import unsafe_names
from zeroamp.checkpoint.replicas import plain_digest, refuse_different_replicas, shard_digest
from zeroamp.checkpoint.writer import save_tensors
from zeroamp.hooks.random_state import random_state
from zeroamp.planning.mesh import device_of, replicate_size
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.policies.numbers import is_integer
from zeroamp.rank_group import RankGroup
from zeroamp.training.refused_arguments import Scheduler, StatefulScheduler, refuse_unsharded
from zeroamp.training.step import TrainStep, driver_of
from zeroamp.version import __version__
from zeroamp.weights.drafts import sync_to_disk, write_durably
from zeroamp.weights.files import MANIFEST
from zeroamp.wrapping.state import WrapState, reshard, wrap_state

OWN = "own"
"""The digest of a tensor that each rank saves for itself."""


@overload
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    async_: Literal[False] = False,
    keep: int | None = None,
    exclude_frozen_parameters: bool = False,
) -> Path: ...


@overload
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    async_: bool,
    keep: int | None = None,
    exclude_frozen_parameters: bool = False,
) -> Path | Future[Path]: ...


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    async_: bool = False,
    keep: int | None = None,
    exclude_frozen_parameters: bool = False,
) -> Path | Future[Path]:
    """Save everything that training needs to continue bit for bit, as `folder`/step_<step>. All ranks call it.

    Saves parameters, persistent buffers, optimizers, schedulers, loss scale, step counts, every rank's random states,
    and `extra`. The folder must be on a file system that all ranks share. A checkpoint gets its name only when all of
    it is on the disk, so `load_checkpoint` never loads a partial one, whichever process is killed.

    Args:
        folder: the folder of the run's checkpoints. It is created if it does not exist.
        model: a model that `wrap_model` returned.
        train: the model's `TrainStep`, between two optimizer steps.
        step: number in the checkpoint's name; `train.num_steps` by default.
        extra: a dict of this rank, such as the position in the data: tensors, numbers, strings, and containers of them.
        async_: copy the state to CPU memory, return, and write while training continues. A second save waits for the
            first. If the save fails, `TrainStep.step` raises the error, on all ranks in the same step.
        keep: how many checkpoints of this run to retain, this one included. Older ones are removed once this one is on
            the disk. Checkpoints that are not ancestors of this one, by saving and loading, are never removed. None:
            retain all.
        exclude_frozen_parameters: leave out parameters with `requires_grad` False, such as the base of adapters. A load
            leaves the model's own values of these parameters, and refuses a model in which one is trainable.

    Returns:
        The checkpoint's path; with `async_` a future of it.

    Raises:
        CheckpointError: on all ranks, if any rank could not write, or ranks that hold the same shard (stage 0, HSDP)
            differ in it. All files of the checkpoint are then removed.
        StepError: called inside an optimizer step, or after a backward or step raised, or a trainable parameter is
            not sharded.

    Examples:
        >>> model = zeroamp.wrap_model(nn.Linear(8, 1), zeroamp.policy_from_config({"zero_optimization": {"stage": 3}}))
        >>> train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
        >>> train.backward(model(torch.ones(4, 8)).square().mean())
        >>> report = train.step()
        >>> path = zeroamp.save_checkpoint(folder, model, train, extra={"sample": 4})
        >>> zeroamp.latest_checkpoint(folder) == path
        True
        >>> zeroamp.load_checkpoint(folder, model, train)
        {'sample': 4}
    """
    state = wrap_state(model)
    driver_of(train).micro_batches.refuse_after_failure("save_checkpoint")  # the state may be half updated
    saving = saving_of(state)
    saving.abandon()
    ranks = RankGroup.for_saving(state.axes.whole)
    step = train.num_steps if step is None else step
    excluded = frozen_names(state.root) if exclude_frozen_parameters else []
    ranks.refuse_different(
        "save_checkpoint", lambda: {**_arguments(Path(folder), step, keep, train), "frozen parameters": excluded}
    )
    checkpoint = _Save(
        folder=Path(folder),
        step=step,
        snapshot=take_snapshot(state, train, extra, ranks, excluded),
        ranks=ranks,
        state=state,
        run=saving.run or uuid.uuid4().hex,
        keep=keep,
    )
    saving.run = checkpoint.run
    if not async_:
        return checkpoint.write()
    future = ranks.background = checkpoint.write_in_background()
    saving.begin(future)
    return future


def _arguments(folder: Path, step: int, keep: int | None, train: TrainStep) -> dict[str, Any]:
    """Return the arguments that must be the same on all ranks, and check them."""
    if is_checkpoint_name(folder.name) or os.path.lexists(folder / MANIFEST):
        raise CheckpointError(
            f"{folder} is a checkpoint, or has the name of one: load_checkpoint would not look for checkpoints in it. "
            "Save into another folder."
        )
    for name, value, least in (("step", step, 0), ("keep", 1 if keep is None else keep, 1)):
        if not is_integer(value, at_least=least):
            valid = f"an integer >= {least}"
            raise CheckpointError(describe(f"save_checkpoint({name}=)", repr(value), valid, "Pass such a number."))
    return {"folder": str(folder), "step": step, "keep": keep, "steps taken": train.num_steps}


@dataclass(slots=True)
class Snapshot:
    """What one rank saves: tensors by name, and everything else as bytes."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Saved by torch.distributed.checkpoint: sharded DTensors, and plain tensors that are the same on all ranks."""
    values: bytes = b""
    """Step counts, scheduler states and descriptions of the optimizers: the same on all ranks."""
    own: bytes = b""
    """This rank's random state, `extra`, extra states of modules, and plain tensors that differ between ranks."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Name -> content of the files that `export_checkpoint` needs."""


def take_snapshot(
    state: WrapState, train: TrainStep, extra: Any, ranks: RankGroup, excluded: Sequence[str] = ()
) -> Snapshot:
    """Return the present state of training. Tensors are not copied. Parameters named in `excluded` are left out.

    Raises:
        CheckpointError: on all ranks, if any rank has a value that cannot be saved, or replicas of a shard differ.
        StepError: called inside an optimizer step, or a trainable parameter is not sharded.
    """
    counts = train.state_dict()  # raises on every rank: all are at the same micro-batch
    # After an evaluation at stage 1 or 2, the sharded parameters are not in their modules.
    reshard(state.root.modules())
    snapshot = Snapshot()
    digests: dict[str, str] = {}
    has_replicas = not state.axes.is_plain or replicate_size(state.axes.fsdp) > 1

    def collect() -> None:
        refuse_unsharded(state.root)
        snapshot.tensors = model_tensors(state.root, excluded)
        dims = shard_dims(snapshot.tensors)
        snapshot.tensors |= callback_tensors(train.callbacks)
        descriptions = []
        for optimizer in train.optimizers:
            tensors, description = optimizer_state(optimizer, state.root)
            snapshot.tensors |= tensors
            descriptions.append(description)
        schedulers = [_scheduler_state(scheduler) for scheduler in train.schedulers]
        values: dict[str, Any] = {"train": counts, "scheduler": schedulers, "optimizer": descriptions}
        values |= {"excluded": list(excluded)} if excluded else {}
        values["shard_dims"], values["axes"] = dims, state.axes.describe()
        snapshot.values = _to_bytes(values, "The state of optimizer and scheduler")
        snapshot.files = export_files(state.root, excluded)
        for name, tensor in snapshot.tensors.items():
            if isinstance(tensor, DTensor):
                digests[name] = shard_digest(tensor, has_replicas=has_replicas)
            elif is_subclass(tensor):  # a part of the optimizer's state of this rank's shard
                digests[name] = OWN
            else:
                digests[name] = plain_digest(tensor)

    ranks.run(collect)
    of_ranks = ranks.run(lambda: digests)
    _refuse_forms(of_ranks)
    refuse_different_replicas(of_ranks, ranks.ranks, state.root)
    differing = [name for name in sorted(digests) if _is_of_each_rank([of_rank[name] for of_rank in of_ranks])]

    def pack() -> None:
        content = {
            "random": random_state(device_of(state.mesh)),
            "extra_states": extra_states(state.root),
            "tensors": {name: snapshot.tensors[name] for name in differing},
            "extra": extra,
        }
        snapshot.own = _to_bytes(content, "extra (or the result of a module's get_extra_state())")

    ranks.run(pack)
    for name in differing:
        if name.startswith(OPTIMIZER):  # each rank saves its own, to be loaded by as many ranks
            del snapshot.tensors[name]
    return snapshot


def _is_of_each_rank(digests: list[str]) -> bool:
    """Return whether each rank saves its own tensor, given its digests: it is no DTensor, and the ranks differ."""
    return digests[0] == OWN or (_form(digests[0]) != "sharded" and len(set(digests)) > 1)


def _form(digest: str) -> str:
    return digest.partition(" ")[0]


def _refuse_forms(digests: list[dict[str, str]]) -> None:
    """Raise CheckpointError for a tensor that only some ranks have, or for a buffer whose shapes differ."""
    names = sorted(set().union(*digests))
    forms = {name: {_form(of_rank.get(name, "none")) for of_rank in digests} for name in names}
    for name in names:
        if "none" in forms[name] or (len(forms[name]) > 1 and not name.startswith(OPTIMIZER)):
            raise CheckpointError(
                f"{name} must have the same shape and dtype on all ranks, but is {' or '.join(sorted(forms[name]))}, "
                "depending on the rank. Register it on every rank, with one shape and dtype."
            )


def _scheduler_state(scheduler: Scheduler | None) -> dict[str, Any] | None:
    """Return a scheduler's class and state, or None for None. Raise CheckpointError if it has no state_dict."""
    if scheduler is not None and not isinstance(scheduler, StatefulScheduler):
        raise CheckpointError(
            f"The scheduler, a {type(scheduler).__name__}, must have state_dict and load_state_dict, because a "
            "checkpoint saves its state, but lacks at least one of them. Add both."
        )
    return None if scheduler is None else {"class": type(scheduler).__name__, "state": scheduler.state_dict()}


def _to_bytes(content: dict[str, Any], where: str) -> bytes:
    """Return `content` as bytes of `torch.save`. Raise CheckpointError for what `weights_only=True` could not read."""
    file = io.BytesIO()
    try:
        torch.save(content, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        found = ", ".join(unsafe_names(file)) or error
        raise CheckpointError(
            f"{where} must hold tensors, numbers, strings, None, and dicts, lists and tuples of them, but holds "
            f"something that cannot be saved: {found}. Convert it."
        ) from error
    return file.getvalue()


@dataclass(slots=True, kw_only=True)
class _Save:
    """Writes one checkpoint together with the other ranks, in the calling thread or in the background."""

    folder: Path
    step: int
    snapshot: Snapshot
    ranks: RankGroup
    state: WrapState
    run: str
    keep: int | None
    draft: Draft | None = None
    """None except on the first rank."""
    path: Path = field(default_factory=Path)
    """Path of the draft."""
    records: dict[str, FileRecord] = field(default_factory=dict)
    """Name -> size and digest of each file that this rank wrote. The first rank's host might not see the files yet."""

    def write_in_background(self) -> Future[Path]:
        """Copy the tensors, then write in a thread.

        torch's `async_save` does the same, with its stager and its `save` in a thread. Here the ranks exchange errors
        of the copy before the thread starts, because the copy and the thread use the same process group.
        """
        stager = DefaultStager(StagingOptions(False, False, False, False))

        def stage() -> None:
            staged = stager.stage(self.snapshot.tensors)
            if isinstance(staged, Future):
                raise AssertionError("expected a stager that waits, got a future")
            self.snapshot.tensors = staged

        self.ranks.run(stage)
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zeroamp-checkpoint")
        future = executor.submit(self.write)
        future.add_done_callback(lambda _: stager.close())
        executor.shutdown(wait=False)
        return future

    def write(self) -> Path:
        """Write the draft and publish it. If any rank fails, remove it."""
        try:
            self.path = self.ranks.on_first(self._open_draft)
            self.ranks.run(self._write_own)
            self.records |= save_tensors(self.snapshot.tensors, self.path, self.ranks)
            return self.ranks.reduce(self._sync, self._publish)
        except BaseException as error:
            if self.draft is not None:
                self.draft.discard()
            if isinstance(error, CheckpointError):  # an OSError of a full disk does not name the folder
                raise type(error)(f"Step {self.step} is not saved in {self.folder}: {error}") from error
            raise

    def _open_draft(self) -> Path:
        self.draft = open_draft(self.folder, self.step)
        return self.draft.path

    def _write_own(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} was created by the first rank, but this rank does not see it. Save into a folder on a "
                "file system that all ranks share."
            )
        for name, content in self._own_files().items():
            write_durably(self.path / name, content)
            self.records[name] = record_content(content)

    def _own_files(self) -> dict[str, bytes]:
        own = {rank_file(self.ranks.rank): self.snapshot.own}
        return {**own, VALUES: self.snapshot.values, **self.snapshot.files} if self.ranks.rank == 0 else own

    def _sync(self) -> dict[str, FileRecord]:
        """Sync the folder's entries to the disk, check this rank's file sizes, and return its records."""
        sync_to_disk(self.path)
        for name, record in self.records.items():
            refuse_other_size(self.path / name, record)
        return self.records

    def _publish(self, records: list[dict[str, FileRecord]]) -> Path:
        if self.draft is None:
            raise AssertionError("expected the first rank to hold the draft")
        files = {name: record for of_rank in records for name, record in of_rank.items()}
        serials = []

        def manifest(serial: int) -> Manifest:
            serials.append(serial)
            return Manifest(
                step=self.step,
                serial=serial,
                parent=saving_of(self.state).serial,
                run=self.run,
                world_size=self.ranks.num_ranks,
                mesh=tuple(self.state.axes.whole.mesh.shape),
                config=self.state.plan.policy.to_config(),
                versions={"torch": str(torch.__version__), "zeroamp": __version__},
                files=files,
            )

        path = self.draft.publish(manifest, self.keep)
        saving_of(self.state).serial = serials[0]
        return path
