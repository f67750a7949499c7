"""Drafts of exports: on the disk before they get their name, removed by the next export if their writer was killed."""

import errno
import os
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import zeroamp
from tests.selection import slow_but
from zeroamp.weights import files as weight_files
from zeroamp.weights.drafts import has_writer, make_draft, make_folder, unlock
from zeroamp.weights.export import OneProcess, Source, export_tensors

pytest.importorskip("safetensors", reason="the files are safetensors")


def export(folder, num_files=1):
    def source(name):
        return Source(
            name=name, shape=(4,), dtype=torch.float32, is_parameter=True, read=lambda dtype: torch.ones(4, dtype=dtype)
        )

    def write_config(draft, _):
        (draft / "config.json").write_text("{}")

    sources = [source(f"t{index}") for index in range(num_files)]
    export_tensors(lambda: sources, folder, lambda: torch.float32, 16, write_config, OneProcess())


@pytest.fixture
def synced(monkeypatch):
    """Return what was synced and renamed, in order."""
    done = []
    fsync, rename, replace = os.fsync, Path.rename, os.replace

    def sync(descriptor):
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", lambda ours, to: done.append(("rename", str(ours))) or rename(ours, to))
    monkeypatch.setattr(os, "replace", lambda ours, to: done.append(("rename", str(ours))) or replace(ours, to))
    return done


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("num_files", [1, 3])
def test_all_files_are_on_the_disk_before_the_export_has_its_name(tmp_path, synced, exists, num_files):
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    export(out, num_files)
    first_rename = next(index for index, (what, _) in enumerate(synced) if what == "rename")
    names = {Path(path).name for what, path in synced[:first_rename] if what == "sync"}
    assert {path.name for path in out.iterdir()} <= names
    assert any(".draft-" in name or name.startswith(".out.draft") for name in names)  # the draft's own entries
    after = [path for what, path in synced[first_rename:] if what == "sync"]
    assert str(tmp_path) in after
    assert (str(out) in after) == exists


def test_folders_above_a_new_one_are_on_the_disk(tmp_path, synced):
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [("sync", str(tmp_path / above)) for above in ("", "a", "a/b")]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 3
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")


def test_a_folder_that_another_job_creates_in_between_is_taken(tmp_path, monkeypatch):
    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path, **options: mkdir(path) or mkdir(path, **options))
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@contextmanager
def failing_closes():
    """Let every close of a file's descriptor fail after it has closed, as on NFS."""
    close = os.close

    def fail(descriptor):
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        close(descriptor)
        if is_file:
            raise OSError(errno.EIO, "Input/output error")

    os.close = fail
    try:
        yield
    finally:
        os.close = close


def test_a_close_that_fails_hides_no_error_and_is_none(tmp_path, monkeypatch):
    with failing_closes():
        export(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json"}

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with failing_closes(), pytest.raises(OSError, match="No space left on device"):
        export(tmp_path / "out")
    assert not list(tmp_path.rglob("*draft-*"))


KILLED = """
import os, signal, sys
from pathlib import Path
from zeroamp.weights import export
export.write_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.path.insert(0, sys.argv[2])
from tests.zeroamp.weights.test_drafts import export as run
run(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("exists", slow_but([False, True], True))
def test_the_draft_of_a_killed_export_goes_with_the_next_one(tmp_path, exists):
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    result = subprocess.run([sys.executable, "-c", KILLED, str(out), os.getcwd()], check=False, timeout=120)
    assert result.returncode == -9
    (draft,) = tmp_path.rglob("*draft-*")
    assert has_writer(draft) is False
    export(out)
    assert not list(tmp_path.rglob("*draft-*"))
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json"}


def test_a_draft_whose_writer_lives_stays_and_so_does_one_that_could_not_be_moved(tmp_path, monkeypatch):
    lock = make_draft(tmp_path / ".out.draft-00000000")
    others = [tmp_path / name for name in (".out.draft-mine", ".other.draft-00000000")]
    for path in others:
        path.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(zeroamp.CheckpointError, match="could not be moved"):
            export(tmp_path / "out")
    (complete,) = (path.parent for path in tmp_path.rglob("model.safetensors"))
    export(tmp_path / "out")
    assert all(path.is_dir() for path in (tmp_path / ".out.draft-00000000", complete, *others))
    unlock(lock)
    export(tmp_path / "out2")
    assert (tmp_path / ".out.draft-00000000").is_dir()  # of another place
    (tmp_path / "out").rename(tmp_path / "moved")
    export(tmp_path / "out")
    assert not (tmp_path / ".out.draft-00000000").exists()


def test_the_writers_file_is_not_published(tmp_path):
    export(tmp_path / "out")
    export(tmp_path / "out")
    assert not list(tmp_path.rglob(weight_files.WRITER))
