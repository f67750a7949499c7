"""Damaged files, and files that mean harm: never loaded, never run. The one before is taken, or the error names it."""

import logging
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.measuring.logs import log_lines
from tests.processes.checkpoint_training import Case, Training, error_of
from tests.zeroamp.checkpoint.checkpoint_files import record_again, rewrite_manifest
from zeroamp.checkpoint.reader import CheckpointReader
from zeroamp.policies.errors import CheckpointError

FILES = [
    "zeroamp.json", ".metadata", "train.pt", "rank_00000.pt", "rank_00001.pt", "__0_0.distcp", "__1_0.distcp",
    "weights.json",
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
            assert f"{tmp_path}/step_00000001/.metadata is damaged: FileNotFoundError" in error


class Harm:
    def __init__(self, marker):
        self.command = f"touch {marker}"

    def __reduce__(self):
        return os.system, (self.command,)


def _harmful(folder):
    """Replace files by pickles that would run a command, with a manifest that fits; return errors and what changed."""
    training = Training(Case()).run(0, 1)
    path = training.save(folder)
    marker = f"{folder}/harm"
    found = {}
    for name in FILES[1:-1]:  # loading does not read weights.json
        content, manifest = (path / name).read_bytes(), (path / "zeroamp.json").read_bytes()
        if dist.get_rank() == 0:
            harm = Harm(marker)
            if name == ".metadata":
                (path / name).write_bytes(pickle.dumps(harm))
            else:
                torch.save({"extra": harm, "tensors": harm}, path / name)
            record_again(path, name)
        dist.barrier()
        found[name] = error_of(training.load, folder)
        _restore(path / "zeroamp.json", manifest)
        _restore(path / name, content)
    assert training.load(folder) is None
    return found, os.path.exists(marker)


def test_files_that_would_run_code_are_refused_though_their_digests_fit(ranks2, tmp_path):
    for found, harmed in ranks2.run(_harmful, str(tmp_path)):
        assert not harmed
        assert all(error.startswith("CheckpointError: ") for error in found.values())
        assert ".metadata refers to posix.system" in found[".metadata"]
        assert "rank 1: " in found["rank_00001.pt"]
        assert "rank 0: " in found["rank_00000.pt"]
        assert all("posix.system" in found[name] for name in FILES[1:5])


# From protocol 4 on, a name may lead through attributes: this one to the `os` of an allowed module, and to `system`.
DOTTED = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c\x04true\x85R."


def _metadata_of_others(folder):
    """Metadata that sends the reader elsewhere, is no metadata, or is left out of the manifest."""
    training = Training(Case()).run(0, 1)
    path = training.save(folder)
    good = path.with_name("good")
    found = {}
    if dist.get_rank() == 0:
        shutil.copytree(path, good)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = "../good/" + info.relative_path
        variants = {"elsewhere": pickle.dumps(metadata), "a list": pickle.dumps([1, 2]), "dotted": DOTTED}
    dist.barrier()
    for name in ("elsewhere", "a list", "dotted"):
        if dist.get_rank() == 0:
            (path / ".metadata").write_bytes(variants[name])
            record_again(path, ".metadata")
        dist.barrier()
        found[name] = error_of(training.load, path)
        dist.barrier()
    for name in ("train.pt", "rank_00001.pt"):
        if dist.get_rank() == 0:
            rewrite_manifest(good, lambda content, name=name: content["files"].pop(name))
        dist.barrier()
        found[name] = error_of(training.load, good)
        dist.barrier()
    return found


def test_metadata_that_leads_out_of_the_checkpoint_is_refused(ranks2, tmp_path):
    for found in ranks2.run(_metadata_of_others, str(tmp_path)):
        assert "no record of ../good/__0_0.distcp" in found["elsewhere"]
        assert re.search("/.metadata .*got list", found["a list"])
        assert "refers to torch.serialization.os.system" in found["dotted"]
        assert "no record of train.pt" in found["train.pt"]
        assert "no record of " in found["rank_00001.pt"]
        assert all(error.startswith("CheckpointError: ") for error in found.values())


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", b"\x80\x04.", pickle.dumps({}), b"cos\nsystem\n."])
def test_metadata_that_is_none(tmp_path, content):
    Path(tmp_path, ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata .*(Load another|Do not load)"):
        CheckpointReader(tmp_path, ()).read_metadata()
