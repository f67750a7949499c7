"""Folders that are on the disk when the call that creates them returns."""

import os
from pathlib import Path

import pytest

from zeroamp.weights.drafts import make_folder


@pytest.fixture
def synced(monkeypatch):
    """Return what was synced, in order."""
    done = []
    fsync = os.fsync

    def sync(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return done


def test_folders_above_a_new_one_are_on_the_disk(tmp_path, synced):
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [str(tmp_path / above) for above in ("", "a", "a/b")]
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
