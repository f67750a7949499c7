"""`save_checkpoint`: a snapshot of training, written by all ranks and published by one rename.

    snapshot   plain values and random states as bytes, tensors by name (copied to CPU memory for a background save)
    draft      the first rank creates an empty folder
    plan       each rank writes its own file to the disk (fsync). The first rank divides the tensors among the ranks
    write      each rank writes its chunks of tensors to the disk, and computes digests of its files
    publish    the first rank writes the manifest, renames the draft and writes `latest`. The checkpoint is saved now.
               Then the first rank removes old checkpoints

Each line runs in a `RankGroup`: an error of one rank is raised on all ranks, and the draft is removed. What is planned
and written is torch.distributed.checkpoint's.
"""

import io
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.folder import MAX_STEP, CheckpointDraft, is_checkpoint_name, open_draft
from zeroamp.checkpoint.half_loaded import state_of
from zeroamp.checkpoint.manifest import METADATA, VALUES, FileRecord, Manifest, rank_file, record_file
from zeroamp.checkpoint.model_state import frozen_names, model_tensors, state_by_name
from zeroamp.checkpoint.optimizer_state import class_name, optimizer_state
from zeroamp.checkpoint.tensors import unsafe_names
from zeroamp.checkpoint.torch_metadata import layouts_of
from zeroamp.hooks.random_state import random_state
from zeroamp.host_memory.storages import put_state_away
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.policies.numbers import is_integer
from zeroamp.rank_group import RankGroup
from zeroamp.training.refused_arguments import Scheduler, StatefulScheduler, refuse_unsharded
from zeroamp.training.step import TrainStep
from zeroamp.version import __version__
from zeroamp.weights.drafts import sync_to_disk, write_durably
from zeroamp.weights.files import MANIFEST
from zeroamp.wrapping.state import WrapState, refuse_single_part, reshard, wrap_state

logger = logging.getLogger("zeroamp")

Values = dict[str, Any]
"""What is saved in a file of `torch.save`."""

run_of_root: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()
"""Name of a model's run over all its restarts. The first save or load sets it. Checkpoints have the first rank's."""
_OF_STATE = "The state of optimizer and scheduler"
_ATTRIBUTE = "_zeroamp_save"
"""The attribute of a model that holds the future of its last background save, until the error of that was raised. An
error refers to the model, so nothing else may hold the future when it is done."""


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
) -> Path:
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
        async_: copy the state to CPU memory, return, and write while training continues. If the write fails, the error
            is logged, and the next save, load or `wait_for_save` raises it, on all ranks.
        keep: how many checkpoints of this run, up to this step, to retain, this one included. Older ones are removed
            once this one is on the disk. Checkpoints of later steps or other runs are never removed. None: retain all.
        exclude_frozen_parameters: leave out parameters with `requires_grad` False, such as the base of adapters. A load
            leaves the model's own values of these parameters, and refuses a model in which one is trainable.

    Returns:
        The checkpoint's path. With `async_` it exists once the write has ended.

    Raises:
        CheckpointError: on all ranks, if any rank could not write, or the ranks pass different arguments. The text
            states whether the checkpoint is saved; if not, its files are removed.
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
    refuse_single_part(state, "save_checkpoint")
    refuse_other_train("save_checkpoint", train)
    state.step.refuse_after_failure("save_checkpoint")  # the state may be half updated
    wait_for_save(model)
    ranks = RankGroup.for_saving(state.axes.whole, "save_checkpoint")
    step = train.num_steps if step is None else step
    excluded = frozen_names(state.root) if exclude_frozen_parameters else []
    arguments = {"async_": async_, "frozen parameters": exclude_frozen_parameters if state.axes.is_joined else excluded}
    ranks.refuse_different("save_checkpoint", lambda: _arguments(Path(folder), step, keep, train) | arguments)
    run = run_of_root.setdefault(state.root, uuid.uuid4().hex)
    save = _Save(folder=Path(folder), step=step, ranks=ranks, state=state, run=run, keep=keep)
    return save.begin(train, extra, excluded, in_background=async_)


def wait_for_save(model: nn.Module) -> None:
    """Wait until the background save of a wrapped model has ended. Call it on every rank.

    A loop calls it at its end, after saves with `save_checkpoint(..., async_=True)`.

    Raises:
        CheckpointError: the save failed.
        WrapError: the model is not wrapped.
    """
    root = state_of(model).root
    future: Future[None] | None = getattr(root, _ATTRIBUTE, None)
    if future is not None:
        try:
            future.result()
        finally:
            if future.done():  # a KeyboardInterrupt may have ended the wait
                delattr(root, _ATTRIBUTE)


def _log_error(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        logger.error("The save in the background failed: %s", error)


def refuse_other_train(call: str, train: object) -> None:
    """Raise CheckpointError if the argument `train` of `call` is not a TrainStep, such as an optimizer."""
    if not isinstance(train, TrainStep):
        remedy = "Pass zeroamp.TrainStep(model, optimizer, scheduler), also in a plain loop."
        raise CheckpointError(describe(f"{call}(train=)", f"of {type(train).__name__}", "a TrainStep", remedy))


def _arguments(folder: Path, step: int, keep: int | None, train: TrainStep) -> dict[str, Any]:
    """Return the arguments that must be the same on all ranks, and check them."""
    if is_checkpoint_name(folder.name) or os.path.lexists(folder / MANIFEST):
        raise CheckpointError(
            f"{folder} is a checkpoint, or has the name of one: load_checkpoint would not look for checkpoints in it. "
            "Save into another folder."
        )
    for name, value, least in (("step", step, 0), ("keep", 1 if keep is None else keep, 1)):
        if not is_integer(value, at_least=least) or value > MAX_STEP:
            valid = f"an integer >= {least}, of at most 20 digits"
            raise CheckpointError(describe(f"save_checkpoint({name}=)", repr(value), valid, "Pass such a number."))
    return {"folder": str(folder), "step": step, "keep": keep, "steps taken": train.num_steps}


def _scheduler_state(scheduler: Scheduler | None) -> dict[str, Any] | None:
    """Return a scheduler's class and state, or None for None. Raise CheckpointError if it has no state_dict."""
    if scheduler is not None and not isinstance(scheduler, StatefulScheduler):
        raise CheckpointError(
            f"The scheduler, a {type(scheduler).__name__}, must have state_dict and load_state_dict, because a "
            "checkpoint saves its state, but lacks at least one of them. Add both."
        )
    return None if scheduler is None else {"class": class_name(scheduler), "state": scheduler.state_dict()}


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


def stager(device_type: str) -> DefaultStager:
    """Return what copies the tensors of a save to CPU memory, and waits for the copies.

    From an accelerator they are copied to pinned memory without blocking, several times as fast as to other memory.
    Pinning takes long, so the memory is kept for the next save.
    """
    return _pinned_stager() if device_type != "cpu" else DefaultStager(StagingOptions(False, False, False, False))


@cache
def _pinned_stager() -> DefaultStager:
    options = StagingOptions(
        use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
    )
    return DefaultStager(options)


@dataclass(slots=True, kw_only=True)
class _Save:
    """Saves one checkpoint together with the other ranks."""

    folder: Path
    step: int
    ranks: RankGroup
    state: WrapState
    run: str
    keep: int | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Saved by torch.distributed.checkpoint: the model's tensors, and the sharded ones of its optimizers."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Name -> content of this rank's other files."""
    world: dist.ProcessGroup | None = field(default_factory=lambda: dist.group.WORLD)
    """The default process group when the save began. Without it torch would save each rank on its own."""
    draft: CheckpointDraft | None = None
    """None except on the first rank."""
    path: Path = field(default_factory=Path)
    """Path of the draft."""
    target: Path | None = None
    """Path of the checkpoint, which does not exist before this save publishes it."""
    planner: DefaultSavePlanner = field(default_factory=DefaultSavePlanner)
    writer: FileSystemWriter = field(init=False)
    metadata: Metadata = field(init=False)
    """On the first rank: torch's description of the tensors, which `_divide` makes."""

    def begin(self, train: TrainStep, extra: Any, excluded: Sequence[str], *, in_background: bool) -> Path:
        """Take the snapshot, then write it, in this thread or in the background. Return the checkpoint's path."""
        try:
            self._collect_on_all(train, extra, excluded)
            if in_background:
                self.ranks.run(self._stage)
            with self._removing_draft():
                self.path, self.target = self.ranks.on_first(self._open_draft)
            if not in_background:
                self._write()
                return self.target
        finally:
            for optimizer in train.optimizers:
                put_state_away(optimizer)
        # torch's `async_save` does the same, but its thread ends before the checkpoint is published.
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zeroamp-checkpoint")
        future = executor.submit(self._write)
        setattr(self.state.root, _ATTRIBUTE, future)
        self.ranks.begin_background(future)
        if self.ranks.rank == 0:
            future.add_done_callback(_log_error)  # not a method: the future would retain the model
        executor.shutdown(wait=False)
        return self.target

    def _collect_on_all(self, train: TrainStep, extra: Any, excluded: Sequence[str]) -> None:
        """Take a snapshot of the present state, on all ranks."""
        collect: Callable[[], tuple[Values, Values]] = partial(self._collect, train, extra, excluded)
        if self.state.axes.is_joined:
            from zeroamp.pipelines.checkpoint import collect_all

            collect = collect_all(self.ranks, self.state, collect, partial(_to_bytes, where=_OF_STATE))
        self.ranks.run(lambda: self._encode(*collect()))

    def _collect(self, train: TrainStep, extra: Any, excluded: Sequence[str]) -> tuple[Values, Values]:
        """Return this rank's values, and those that all ranks have. Tensors of the model are not copied."""
        counts = train.state_dict()  # raises inside an optimizer step
        # After an evaluation at stage 1 or 2, the sharded parameters are not in their modules.
        reshard(self.state.root.modules())
        refuse_unsharded(self.state.root)
        self.tensors = model_tensors(self.state.root, excluded)
        own = {name: tensor for name, tensor in self.tensors.items() if not isinstance(tensor, DTensor)}
        descriptions, own_states = [], []
        for optimizer in train.optimizers:
            tensors, description, own_state = optimizer_state(optimizer, self.state.root)
            self.tensors |= tensors
            descriptions.append(description)
            own_states.append(own_state)
        content = {
            "random": random_state(device_of(self.state.mesh)),
            "extra_states": state_by_name(self.state.root)[1],
            "tensors": own,
            "optimizers": own_states,
            "extra": extra,
        }
        schedulers = [_scheduler_state(scheduler) for scheduler in train.schedulers]
        values = {"train": counts, "schedulers": schedulers, "optimizers": descriptions, "excluded": list(excluded)}
        return content, values

    def _encode(self, content: Values, values: Values) -> None:
        """Convert the values to the contents of files."""
        own_bytes = _to_bytes(content, "extra (or the result of a module's get_extra_state())")
        self.files = {rank_file(self.ranks.rank): own_bytes}
        if self.ranks.rank == 0:
            self.files[VALUES] = _to_bytes(values, _OF_STATE)

    def _stage(self) -> None:
        """Copy the tensors to CPU memory. On all ranks before the thread starts, which uses the same process group."""
        staged = stager(device_of(self.state.mesh).type).stage(self.tensors)
        if isinstance(staged, Future):
            raise AssertionError("expected a stager that waits, got a future")
        self.tensors = staged

    def _open_draft(self) -> tuple[Path, Path]:
        self.draft = open_draft(self.folder, self.step)
        return self.draft.path, self.draft.target

    def _write(self) -> None:
        """Write the draft and publish it."""
        with self._removing_draft():
            # By default torch copies ahead on a stream of the current GPU, also for staged tensors, which are on the
            # CPU. In the thread of a background save, the current GPU is GPU 0 on every rank.
            self.writer = FileSystemWriter(self.path, sync_files=True, per_thread_copy_ahead=0)
            plans = self.ranks.gather(self._plan)
            self._refuse_destroyed()
            plan = self.ranks.scatter(lambda: self._divide(plans))
            written = self.ranks.gather(lambda: self._write_tensors(plan))
            self.ranks.on_first(lambda: self._publish(written))

    def _refuse_destroyed(self) -> None:
        """Raise CheckpointError if the program has destroyed the process group before the save ended."""
        if dist.group.WORLD is not self.world:
            raise CheckpointError(
                f"Step {self.step} is not saved in {self.folder}: the process group was destroyed before the save in "
                "the background ended. Call zeroamp.wait_for_save(model) before destroy_process_group()."
            )

    @contextmanager
    def _removing_draft(self) -> Iterator[None]:
        """If any rank fails, remove the draft, and state in the error whether the checkpoint is saved."""
        try:
            yield
        except BaseException as error:
            if self.draft is not None:
                self.draft.discard()
            if self.target is not None and os.path.isdir(self.target):
                outcome = f"Step {self.step} is saved as {self.target}, but the save did not end as usual"
            else:
                outcome = f"Step {self.step} is not saved in {self.folder}"
                self._refuse_destroyed()
            if isinstance(error, CheckpointError):  # an OSError of a full disk does not name the folder
                raise type(error)(f"{outcome}: {error}") from error
            raise

    def _plan(self) -> Any:
        """Write this rank's own files, and return which tensors it could write."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} was created by the first rank, but this rank does not see it. Save into a folder on a "
                "file system that all ranks share."
            )
        for name, content in self.files.items():
            write_durably(self.path / name, content)
        is_first = self.ranks.rank == 0
        self.planner.set_up_planner(self.tensors, self.writer.storage_meta(), is_first)
        self.writer.set_up_storage_writer(is_first)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def _divide(self, plans: list[Any]) -> list[Any]:
        """Return what each rank writes. Only the first rank calls this."""
        plans, self.metadata = self.planner.create_global_plan(plans)
        return self.writer.prepare_global_plan(plans)

    def _write_tensors(self, plan: Any) -> tuple[Any, dict[str, FileRecord]]:
        """Write this rank's chunks. Return torch's description of them, and size and digest of all of its files.

        The first rank's host might not see the files yet.
        """
        written = self.writer.write_data(self.planner.finish_plan(plan), self.planner).wait()
        names = [file.name for file in self.path.glob(f"__{self.ranks.rank}_*")]
        sync_to_disk(self.path)
        return written, {name: record_file(self.path / name) for name in (*self.files, *names)}

    def _publish(self, written: list[tuple[Any, dict[str, FileRecord]]]) -> None:
        if self.draft is None:
            raise AssertionError("expected the first rank to hold the draft")
        self.writer.finish(self.metadata, [of_rank for of_rank, _ in written])  # for other readers
        files = {name: record for _, records in written for name, record in records.items()}
        # `finish` of torch 2.11 sets `storage_data` of a copy of the metadata.
        storage = {result.index: result.storage_data for of_rank, _ in written for result in of_rank}
        manifest = Manifest(
            step=self.step,
            run=self.run,
            world_size=self.ranks.num_ranks,
            mesh=tuple(self.state.axes.whole.mesh.shape),
            config=self.state.plan.policy.to_config(),
            versions={"torch": str(torch.__version__), "zeroamp": __version__},
            files=files | {METADATA: record_file(self.path / METADATA)},
            tensors=layouts_of(self.metadata.state_dict_metadata, storage),
        )
        self.draft.publish(manifest, self.keep)
