"""Damaged files are never loaded. The checkpoint before is taken, or the error names the file."""

import itertools
import logging
from unittest import mock

import torch.distributed as dist

from tests.measuring.logs import log_lines
from tests.processes.checkpoint_training import Case, Training, error_of
from zeroamp.checkpoint import load as load_module

FILES = [
    "zeroamp.json", ".metadata", "train.pt", "rank_00000.pt", "rank_00001.pt", "__0_0.distcp", "__1_0.distcp",
]  # fmt: skip


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


DAMAGES = {"cut": cut, "flipped": flip, "gone": None}


def _damage(path, how):
    """On the first rank, for all; return what was there."""
    content = None
    if dist.get_rank() == 0:
        content = path.read_bytes()
        if DAMAGES[how] is None:
            path.unlink()
        else:
            path.write_bytes(DAMAGES[how](content))
    dist.barrier()
    return content


def _restore(path, content):
    dist.barrier()
    if content is not None:
        path.write_bytes(content)
    dist.barrier()


def _each_damage(folder):
    """For every file, damaged in turn in each way: what was loaded, what was logged, and the explicit path's error."""
    training = Training(Case()).run(0, 1)
    older = training.save(folder, extra=1)
    newer = training.run(1, 2).save(folder, extra=2)
    assert sorted(path.name for path in newer.iterdir()) == sorted(FILES)
    found = []
    for name, how in zip(FILES, itertools.cycle(DAMAGES), strict=False):
        content = _damage(newer / name, how)
        with log_lines(logging.INFO) as texts:
            extra = training.load(folder)
        found.append((extra, [text for text in texts if "is not loaded" in text], error_of(training.load, newer)))
        _restore(newer / name, content)
    with log_lines(logging.INFO) as texts:
        assert training.load(folder) == 2
    assert len(texts) == (dist.get_rank() == 0)
    _damage(newer / "train.pt", "cut")
    _damage(older / ".metadata", "gone")
    return found, [error_of(training.load, path) for path in (folder, newer, older)]


def test_damage_to_every_file_is_found_and_the_checkpoint_before_is_loaded(ranks2, tmp_path):
    for rank, (found, errors) in enumerate(ranks2.run(_each_damage, str(tmp_path))):
        for name, (extra, warnings, error) in zip(FILES, found, strict=True):
            path = f"{tmp_path}/step_00000002/{name}"
            assert extra == 1, name
            assert [path in text for text in warnings] == [True] * (rank == 0), name
            assert error.startswith("DamagedCheckpointError: "), name
            assert f"{path} is damaged: " in error, name
        for error in errors[:2]:
            assert error.startswith("DamagedCheckpointError: ")
            assert f"{tmp_path}/step_00000002/train.pt is damaged: " in error
        for error in errors[::2]:
            assert f"{tmp_path}/step_00000001/.metadata is damaged: [Errno 2] No such file" in error


def _removed_while_reading(folder):
    """Another job's save with keep= removes a checkpoint between its manifest and its files. Return what is loaded."""
    training = Training(Case()).run(0, 1)
    older = training.save(folder, extra=1)
    newer = training.run(1, 2).save(folder, extra=2)
    read, is_gone = load_module.read_manifest, []

    def read_and_remove(path):
        manifest = read(path)
        if path == newer and not is_gone:
            is_gone.append(True)
            newer.rename(newer.with_name(".removed-step_00000002"))
        return manifest

    with mock.patch.object(load_module, "read_manifest", read_and_remove), log_lines(logging.WARNING) as texts:
        extra = training.load(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        newer.with_name(".removed-step_00000002").rename(newer)
    dist.barrier()
    is_gone.clear()
    with mock.patch.object(load_module, "read_manifest", read_and_remove):
        error = error_of(training.load, newer)
    return extra, older.exists(), texts[:1], error


def test_a_checkpoint_that_keep_removes_during_a_load_is_named_as_removed(ranks2, tmp_path):
    for rank, (extra, exists, texts, error) in enumerate(ranks2.run(_removed_while_reading, str(tmp_path))):
        assert (extra, exists) == (1, True)
        is_named = [f"{tmp_path}/step_00000002 was removed while it was read, as a save with" in text for text in texts]
        assert is_named == [True] * (rank == 0)
        assert error.startswith(f"RemovedCheckpointError: {tmp_path}/step_00000002 was removed while it was read")
