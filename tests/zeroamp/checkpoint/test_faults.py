"""A fault at every file operation of a save and of a load, in turn, on each rank: nothing is lost, nothing is half."""

import builtins
import errno
import os
import shutil
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.processes.checkpoint_training import Case, Small, Training, differences, error_of
from tests.selection import slow_but

CALLS = [
    (os, "open"), (os, "close"), (os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "replace"), (os, "unlink"),
    (os, "rmdir"), (os, "stat"), (os, "listdir"), (os, "scandir"), (builtins, "open"), (shutil, "rmtree"),
    (Path, "open"),
]  # fmt: skip


@contextmanager
def failing(number, folder):
    """Let file operation `number` of this process on a path below `folder` fail. Yields the names of those so far."""
    calls = []

    def counted(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            path = args[0] if args else ""
            if not (isinstance(path, int) or str(path).startswith(str(folder))):
                return real(*args, **kwargs)
            calls.append(name)
            if len(calls) - 1 == number:
                if name == "close":  # the descriptor is closed, as on NFS
                    real(*args)
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for owner, name in CALLS:
            patches.enter_context(mock.patch.object(owner, name, counted(owner, name)))
        yield calls


def _one_block():
    model = Small()
    del model.blocks[1]
    return model


CASE = Case(optimizer="momentum", build=_one_block)


def _fill(training, value):
    """Give parameters and state values by which a checkpoint is recognised."""
    training.model.num_seen.fill_(value)


def _save_faults(root, rank, stride):
    """Let every `stride`-th operation fail in turn on one rank, in a save with keep=1. Return what was wrong."""
    wrong, number, saved, first = [], 0, [], Path(root) / "first"
    training, loaded = Training(CASE).run(0, 1), Training(CASE, seed=7)
    mine = dist.get_rank() == rank
    _fill(training, 1)
    training.save(first, step=1)
    _fill(training, 2)
    while True:
        folder = Path(root) / f"{rank}-{number}"
        if dist.get_rank() == 0:
            shutil.copytree(first, folder, symlinks=True)
        dist.barrier()
        with failing(number, root) if mine else nullcontext([]) as calls:
            error = error_of(training.save, folder, step=2, keep=1)
        is_over = _from(rank, len(calls) <= number)
        if is_over:
            break
        dist.barrier()
        names = sorted(path.name for path in folder.iterdir())
        dist.barrier()
        _fill(loaded, 0)
        loaded.load(folder)
        found = int(loaded.model.num_seen)
        if found not in (1, 2) or (error is None and found != 2):
            wrong.append((number, calls[-1:], "loads", found, error))
        if error is not None:
            is_saved = "is saved as" in error
            is_told = is_saved or "is not saved in" in error
            if (
                not error.startswith("CheckpointError: Step 2 is")
                or not is_told
                or is_saved != ("step_00000002" in names)
            ):
                wrong.append((number, calls[-1:], error, names))
        if found == 2 and differences(loaded.state(), training.state(), but_random=True):
            wrong.append((number, "other bits"))
        again = error_of(training.save, folder, step=3, keep=1)
        dist.barrier()
        left = sorted(path.name for path in folder.iterdir())
        dist.barrier()
        if again is not None or left not in (["latest", "step_00000003"], ["latest", "step_00000002", "step_00000003"]):
            wrong.append((number, calls[-1:], "again", again, left))
        inside = sorted(path.name for path in (folder / "step_00000003").iterdir())
        if any("writer" in name for name in inside):
            wrong.append((number, "in the checkpoint", inside))
        saved.append(error is None)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        number += stride
    return wrong, len(saved), sum(saved)


def _from(rank, value):
    found = [value]
    dist.broadcast_object_list(found, src=rank)
    return found[0]


def _load_faults(root, rank, stride):
    training = Training(CASE).run(0, 1)
    folder = Path(root) / "run"
    training.save(folder, step=1)
    expected = training.state()
    wrong, number, num_points, mine = [], 0, 0, dist.get_rank() == rank
    resumed = Training(CASE, seed=7).run(0, 1)
    before = resumed.state()
    while True:
        with failing(number, root) if mine else nullcontext([]) as calls:
            error = error_of(resumed.load, folder)
        if _from(rank, len(calls) <= number):
            break
        if error is not None:
            is_marked = "Call zeroamp.load" in str(error_of(resumed.model.state_dict))
            if not error.startswith(("CheckpointError: ", "DamagedCheckpointError: ")):
                wrong.append((number, calls[-1:], error))
            if not is_marked and differences(resumed.state(), before, but_random=True):
                wrong.append((number, calls[-1:], "changed, but not marked"))
        again = error_of(resumed.load, folder)
        if again is not None or differences(resumed.state(), expected, but_random=True):
            wrong.append((number, calls[-1:], "again", again))
        resumed = Training(CASE, seed=7).run(0, 1)
        number += stride
        num_points += 1
    return wrong, num_points


EACH = [(0, 1), (1, 1)]
"""Rank, and the distance of the operations that fail."""


@pytest.mark.parametrize("case", slow_but([*EACH, (0, 16)], (0, 16)), ids=str)
def test_a_fault_in_a_save_leaves_the_old_or_the_new_state(ranks2, tmp_path, case):
    """The message states which. Trying again succeeds, and leaves nothing of the fault."""
    for wrong, num_points, num_saved in ranks2.run(_save_faults, str(tmp_path), *case):
        assert wrong == []
        assert num_points > 2
        assert num_saved < num_points


@pytest.mark.parametrize("case", slow_but([*EACH, (0, 8)], (0, 8)), ids=str)
def test_a_fault_in_a_load_is_an_error_or_without_effect(ranks2, tmp_path, case):
    for wrong, num_points in ranks2.run(_load_faults, str(tmp_path), *case):
        assert wrong == []
        assert num_points > 2
