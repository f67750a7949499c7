"""Damaged files are never loaded. The checkpoint before is taken, or the error names the file."""

import logging

import torch.distributed as dist

from tests.measuring.logs import log_lines
from tests.processes.checkpoint_training import Case, Training, error_of

FILES = [
    "zeroamp.json", ".metadata", "train.pt", "rank_00000.pt", "rank_00001.pt", "__0_0.distcp", "__1_0.distcp",
]  # fmt: skip


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def flip_first(content):
    return bytes([content[0] ^ 1]) + content[1:]


DAMAGES = {"cut": cut, "flipped": flip, "first byte": flip_first, "gone": None}


def _damage(path, how):
    """On the first rank, for all."""
    if dist.get_rank() == 0:
        if DAMAGES[how] is None:
            path.unlink()
        else:
            path.write_bytes(DAMAGES[how](path.read_bytes()))
    dist.barrier()


def _restore(path, content):
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(content)
    dist.barrier()


def _each_damage(folder):
    """For every file and damage: which checkpoint was loaded, what was logged, and the error of the explicit path."""
    training = Training(Case()).run(0, 1)
    older = training.save(folder, extra=1)
    newer = training.run(1, 2).save(folder, extra=2)
    assert sorted(path.name for path in newer.iterdir()) == sorted(FILES)
    found = {}
    for index, name in enumerate(FILES):
        content = (newer / name).read_bytes()
        for how in DAMAGES:
            _damage(newer / name, how)
            with log_lines(logging.INFO) as texts:
                extra = training.load(folder)
            error = error_of(training.load, newer) if how == list(DAMAGES)[index % len(DAMAGES)] else None
            found[f"{name} {how}"] = (extra, [text for text in texts if "is not loaded" in text], error)
            _restore(newer / name, content)
    with log_lines(logging.INFO) as texts:
        assert training.load(folder) == 2
    assert len(texts) == (dist.get_rank() == 0)
    _damage(newer / "train.pt", "cut")
    _damage(older / ".metadata", "gone")
    return found, [error_of(training.load, path) for path in (folder, newer, older)]


def test_every_damage_to_every_file_is_found_and_the_one_before_is_loaded(ranks2, tmp_path):
    for rank, (found, errors) in enumerate(ranks2.run(_each_damage, str(tmp_path))):
        assert len(found) == len(FILES) * len(DAMAGES)
        for name, (extra, warnings, error) in found.items():
            path = f"{tmp_path}/step_00000002/{name.split(' ')[0]}"
            assert extra == 1, name
            assert [path in text for text in warnings] == [True] * (rank == 0), name
            assert error is None or ("DamagedCheckpointError" in error and path in error), name
        assert sum(error is not None for _, _, error in found.values()) >= len(FILES) - 1
        for error in errors[:2]:
            assert error.startswith("DamagedCheckpointError: ")
            assert f"{tmp_path}/step_00000002/train.pt is damaged: " in error
        for error in errors[::2]:
            assert f"{tmp_path}/step_00000001/.metadata is damaged: [Errno 2] No such file" in error
