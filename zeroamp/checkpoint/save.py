"""`save_checkpoint`: a snapshot of training, written by all ranks and published by one rename.

    snapshot   plain values and random states as bytes, tensors by name (copied to CPU memory for a background save)
    draft      the first rank makes an empty folder, all ranks see it
    write      each rank its shards (torch.distributed.checkpoint) and its own file, all of it to the disk (fsync)
    digest     each rank of the files it wrote
    publish    the first rank: manifest, pointer, rename, then the removal of old ones

Every line ends with an agreement: what fails on one rank is raised on all, and the draft is removed.
"""

import os
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

import zeroamp
from zeroamp.checkpoint.files import METADATA, VALUES, rank_file, sync_folder, write_durably
from zeroamp.checkpoint.folder import Draft, open_draft
from zeroamp.checkpoint.manifest import FileRecord, Manifest, record_file
from zeroamp.checkpoint.snapshot import Snapshot, take_snapshot
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import WrapState, wrap_state


@overload
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep,
    *,
    step: int | None = None,
    extra: Any = None,
    async_: Literal[False] = False,
    keep: int | None = None,
) -> Path: ...


@overload
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep,
    *,
    step: int | None = None,
    extra: Any = None,
    async_: bool,
    keep: int | None = None,
) -> Path | Future[Path]: ...


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    train: TrainStep,
    *,
    step: int | None = None,
    extra: Any = None,
    async_: bool = False,
    keep: int | None = None,
) -> Path | Future[Path]:
    """Save all that training needs to go on, bit for bit, as `folder`/step_<step>. Every rank calls this.

    That is: parameters, persistent buffers, optimizer, scheduler, loss scale, step counts, every rank's random states,
    and `extra`. The folder must be on a file system that all ranks share. A checkpoint has its name only when all of it
    is on the disk, so whatever is killed, `load_checkpoint` never takes half of one.

    Args:
        folder: of the run's checkpoints; made if it is not there.
        model: what `wrap_model` returned.
        train: its training step, at the end of an accumulation window.
        step: names the checkpoint; `train.num_steps` by default.
        extra: this rank's own: the position in the data, say. Tensors, numbers, strings and containers of them.
        async_: copy the state to CPU memory, return, and write while training goes on. One at a time: a second save
            waits for the first. `TrainStep.step` raises an error of the background, on all ranks in the same step.
        keep: how many stay of this one and those it descends from, by saving and loading; older ones are removed once
            this one is on the disk. None: all.

    Returns:
        The checkpoint's path; with `async_` a future of it.

    Raises:
        CheckpointError: on all ranks, where any could not write; nothing of it is left then.
        StepError: inside an accumulation window, or after something raised without a `recover`.
    """
    state = wrap_state(model)
    state.watch.refuse_after_failure("save_checkpoint")  # its state may be half updated
    state.saving.abandon()
    ranks = RankGroup.for_saving(state.mesh)
    step = train.num_steps if step is None else step
    _check_same(ranks.run(lambda: _arguments(Path(folder), step, keep, train)))
    checkpoint = _Save(
        folder=Path(folder),
        step=step,
        snapshot=take_snapshot(state, train, extra, ranks),
        ranks=ranks,
        state=state,
        run=state.saving.run or uuid.uuid4().hex,
        keep=keep,
    )
    state.saving.run = checkpoint.run
    if not async_:
        return checkpoint.write()
    signals = RankGroup.for_signals(state.mesh)  # made before a thread is at work
    future = ranks.background = checkpoint.write_in_background()
    state.saving.begin(future, signals)
    return future


def _arguments(folder: Path, step: int, keep: int | None, train: TrainStep) -> dict[str, Any]:
    """Return what must be the same on all ranks."""
    for name, value, least in (("step", step, 0), ("keep", 1 if keep is None else keep, 1)):
        if type(value) is not int or value < least:
            raise CheckpointError(describe(name, repr(value), f"an integer from {least} on", "Change it."))
    return {"folder": str(folder), "step": step, "keep": keep, "steps taken": train.num_steps}


def _check_same(of_ranks: list[dict[str, Any]]) -> None:
    for name, first in of_ranks[0].items():
        values = [of_rank[name] for of_rank in of_ranks]
        if any(value != first for value in values):
            found = f"{name} {' and '.join(sorted({repr(value) for value in values}))}, depending on the rank"
            remedy = "Where a rank failed in between, load the last checkpoint."
            raise CheckpointError(describe("save_checkpoint", found, "the same on all ranks", remedy))


@dataclass(slots=True, kw_only=True)
class _Save:
    """One checkpoint on its way to the disk."""

    folder: Path
    step: int
    snapshot: Snapshot
    ranks: RankGroup
    state: WrapState
    run: str
    keep: int | None
    draft: Draft | None = None
    """The first rank's."""
    path: Path = field(default_factory=Path)
    """The draft's, on all ranks."""

    def write_in_background(self) -> Future[Path]:
        """Copy the tensors, then write in a thread.

        Torch's `async_save` is this, too: its stager, and its `save` in a thread. Here the ranks agree on the copy
        before the thread begins, since both use the same process group.
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
        """Write the draft and publish it; remove it where any rank fails."""
        try:
            self.path = self.ranks.on_first(self._open_draft)
            self.ranks.run(self._write_own)
            self.ranks.run(self._write_tensors)
            records = self.ranks.run(self._record_own)
            return self.ranks.on_first(lambda: self._publish(records))
        except BaseException as error:
            if self.draft is not None:
                self.draft.discard()
            if isinstance(error, CheckpointError):  # of a full disk, the system's own error does not say which
                raise type(error)(f"step {self.step} is not saved in {self.folder}: {error}") from error
            raise

    def _open_draft(self) -> Path:
        self.draft = open_draft(self.folder, self.step)
        return self.draft.path

    def _write_own(self) -> None:
        if not self.path.is_dir():
            found = "no such folder on this rank, though the first rank made it"
            valid = "a file system that all ranks share"
            raise CheckpointError(describe(str(self.path), found, valid, "Save into a folder on one."))
        for name, content in self._own_files().items():
            write_durably(self.path / name, content)

    def _own_files(self) -> dict[str, bytes]:
        own = {rank_file(self.ranks.rank): self.snapshot.own}
        return {**own, VALUES: self.snapshot.values, **self.snapshot.files} if self.ranks.rank == 0 else own

    def _write_tensors(self) -> None:
        save(
            self.snapshot.tensors,
            storage_writer=FileSystemWriter(self.path, sync_files=True),
            process_group=self.ranks.group,
        )

    def _record_own(self) -> dict[str, FileRecord]:
        """Digest what this rank wrote: another host might not see it yet."""
        names = [*self._own_files(), *(path.name for path in self.path.glob(f"__{self.ranks.rank}_*"))]
        if self.ranks.rank == 0:
            names.append(METADATA)
        sync_folder(self.path)
        return {name: record_file(self.path / name) for name in names}

    def _publish(self, records: list[dict[str, FileRecord]]) -> Path:
        if self.draft is None:
            raise AssertionError("expected the first rank to hold the draft")
        files = {name: record for of_rank in records for name, record in of_rank.items()}
        serials = []

        def manifest(serial: int) -> Manifest:
            serials.append(serial)
            return self._manifest(serial, files)

        path = self.draft.publish(manifest, self.keep)
        self.state.saving.serial = serials[0]
        return path

    def _manifest(self, serial: int, files: dict[str, FileRecord]) -> Manifest:
        return Manifest(
            step=self.step,
            serial=serial,
            parent=self.state.saving.serial,
            run=self.run,
            world_size=self.ranks.num_ranks,
            mesh=tuple(self.state.mesh.mesh.shape),
            config=self.state.plan.policy.to_config(),
            versions={"torch": str(torch.__version__), "zeroamp": zeroamp.__version__},
            files=files,
        )
