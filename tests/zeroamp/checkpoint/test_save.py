"""A save that fails on one rank fails on all, leaves nothing, and training and the next save go on."""

import errno
import os
import re
import stat
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import zeroamp
from tests.processes.checkpoint_training import Case, Training, differences, error_of
from zeroamp.checkpoint.manifest import read_manifest


@contextmanager
def full_disk(num_calls):
    """Let fsync fail from its call number `num_calls` on, and each close of a file after it, as on NFS."""
    real, close, calls = os.fsync, os.close, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > num_calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor)

    def close_and_fail(descriptor):
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        close(descriptor)
        if is_file and len(calls) > num_calls:
            raise OSError(errno.EIO, "Input/output error")

    os.fsync, os.close = fsync, close_and_fail
    try:
        yield calls
    finally:
        os.fsync, os.close = real, close


def _fail(training, folder, failure, rank, async_):
    """Save while `failure` holds on one rank; return the error, and what is in the folder."""
    with failure if dist.get_rank() == rank else nullcontext():
        error = error_of(_save_and_wait, training, folder, async_)
    dist.barrier()
    names = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else None
    dist.barrier()
    return error, names


def _save_and_wait(training, folder, async_):
    training.save(folder, async_=async_)
    zeroamp.wait_for_save(training.model)


def _failures(folder):
    """What each failing save said and left; and training on after them all, against training without saves."""
    undisturbed = Training(Case()).run(0, 2).state()
    training = Training(Case()).run(0, 1)
    with full_disk(10**6) as calls:
        training.save(folder)
    num_syncs = [None] * dist.get_world_size()
    dist.all_gather_object(num_syncs, len(calls))
    found = {}
    for rank in (0, 1):
        for number in range(num_syncs[rank]):
            found[number, rank] = _fail(training, folder, full_disk(number), rank, async_=number == 1)
    training.run(1, 2)
    path = training.save(folder)
    state = training.state()
    loaded = Training(Case(), seed=7)
    loaded.load(folder)
    return found, path.name, differences(loaded.state(), state), differences(undisturbed, state)


def test_a_full_disk_on_one_rank_fails_on_all_and_leaves_nothing(ranks2, tmp_path):
    for found, name, after_load, against_undisturbed in ranks2.run(_failures, str(tmp_path)):
        assert [sum(rank == which for _, rank in found) for which in (0, 1)] == [11, 3]
        for where, (error, names) in found.items():
            assert error.startswith(f"CheckpointError: Step 1 is not saved in {tmp_path}: rank {where[1]}: "), where
            assert "No space left on device" in error, where
            assert names == ["latest", "step_00000001"], where
        assert (name, after_load, against_undisturbed) == ("step_00000002", [], [])


def _impossible_folders(folder):
    training = Training(Case())
    if dist.get_rank() == 0:
        Path(folder, "file").write_text("x")
        Path(folder, "here").mkdir()
        Path(folder, "there").mkdir()
    dist.barrier()
    errors = [error_of(training.save, path) for path in (f"{folder}/file", f"{folder}/file/below", "/proc/none")]
    with chdir(f"{folder}/{'there' if dist.get_rank() else 'here'}"):
        errors.append(error_of(training.save, "relative"))
    dist.barrier()  # the first rank has removed its draft
    left = sorted(path.name for path in Path(folder, "here", "relative").iterdir())
    return errors, left, training.save(f"{folder}/works").name


def test_folders_that_are_none_or_that_one_rank_does_not_see(ranks2, tmp_path):
    for errors, left, name in ranks2.run(_impossible_folders, str(tmp_path)):
        assert all(re.match(r"CheckpointError: Step 0 is not saved in \S+: rank ", error) for error in errors)
        assert "rank 0: FileExistsError: " in errors[0]
        assert "rank 0: NotADirectoryError: " in errors[1]
        assert "rank 1: relative/.draft-" in errors[3]
        assert "a file system that all ranks share" in errors[3]
        assert (left, name) == ([], "step_00000000")


def _unlike(folder):
    training = Training(Case())
    training.model.register_buffer("rows", torch.full((dist.get_rank() + 1,), 2.0))
    training.save(folder)
    training.model.rows.zero_()
    training.load(folder)
    return training.model.rows.tolist()


def test_a_buffer_of_another_shape_on_each_rank_goes_on(ranks2, tmp_path):
    assert ranks2.run(_unlike, str(tmp_path)) == [[2.0], [2.0, 2.0]]


class NoState:
    def step(self):
        pass


def _contents(folder):
    training = Training(Case(mesh_shape=(1, 2)))
    first = training.save(folder, step=50, keep=2)
    for step in (70, 60, 60):
        path = training.save(Path(folder), step=step, keep=2)
    training.train = zeroamp.TrainStep(training.model, training.optimizer, NoState())
    return first, path, error_of(training.save, folder)


def test_names_steps_and_what_the_manifest_says(ranks2, tmp_path):
    for first, path, error in ranks2.run(_contents, str(tmp_path)):
        assert first == tmp_path / "step_00000050"
        assert path == tmp_path / "step_00000060_2"
        assert re.search("scheduler, a NoState, .*load_state_dict", error)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000060", "step_00000060_2", "step_00000070"]
    manifest = read_manifest(path)
    assert (manifest.step, manifest.world_size, manifest.mesh) == (60, 2, (1, 2))
    assert set(manifest.files) == {file.name for file in path.iterdir()} - {"zeroamp.json"}
    assert zeroamp.policy_from_config(manifest.config).stage == 3
    assert manifest.versions == {"torch": str(torch.__version__), "zeroamp": zeroamp.__version__}


def _into_a_checkpoint(folder):
    training = Training(Case()).run(0, 1)
    named = folder / "step_5"
    inside = training.save(folder / "run")
    if dist.get_rank() == 0:
        (folder / "renamed").symlink_to(inside)
    dist.barrier()
    errors = [error_of(training.save, path) for path in (named, inside, folder / "renamed")]
    return errors, named.exists(), sorted(path.name for path in inside.iterdir())


def test_a_folder_that_is_a_checkpoint_is_refused(ranks2, tmp_path):
    """A folder that is a checkpoint or has the name of one is refused."""
    for errors, exists, names in ranks2.run(_into_a_checkpoint, tmp_path):
        assert not exists
        assert "zeroamp.json" in names
        assert not [name for name in names if "step" in name or "draft" in name]
        for error in errors:
            assert re.search("CheckpointError: .* has the name of one: .*Save into another folder", error)
