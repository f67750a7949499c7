"""A folder of checkpoints: which is the newest, what a killed writer leaves, and what pruning removes. No ranks."""

import errno
import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

import zeroamp
from tests.zeroamp.checkpoint.checkpoint_files import manifest
from zeroamp import latest_checkpoint
from zeroamp.checkpoint import folder as folder_module
from zeroamp.checkpoint.folder import find_checkpoints, is_checkpoint, open_draft
from zeroamp.weights.files import MANIFEST


class Killed(BaseException):
    pass


def publish(root, step, keep=None, run="a"):
    draft = open_draft(root, step)
    draft.publish(manifest(step=step, run=run), keep)
    return draft.target


def name(step):
    return f"step_{step:08d}"


def order(root):
    return [path.name for path in find_checkpoints(root)]


def names(root):
    return {path.name for path in root.iterdir()}


def test_the_newest_is_the_one_that_was_published_last_whatever_its_step(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nothing") is None
    for step in (200, 300, 100, 250):
        path = publish(tmp_path, step)
        assert latest_checkpoint(str(tmp_path)) == path
    assert order(tmp_path) == [name(250), name(200), name(100), name(300)]
    assert (tmp_path / "latest").read_text() == name(250)
    assert names(tmp_path) == {*order(tmp_path), "latest"}
    assert names(path) == {MANIFEST}


def test_the_pointer_goes_back_and_what_came_after_it_comes_last(tmp_path):
    for step in (1, 2, 3, 4):
        publish(tmp_path, step)
    (tmp_path / "latest").write_text(f"{name(2)}\n")
    assert order(tmp_path) == [name(step) for step in (2, 1, 4, 3)]
    assert publish(tmp_path, 3).name == f"{name(3)}_2"  # what was there stays as it was
    assert order(tmp_path) == [f"{name(3)}_2", *(name(step) for step in (3, 2, 1, 4))]


@pytest.mark.parametrize(
    "pointer",
    [b"", b"step_00000009", b"\xff\xfe\x00", b"../other/step_00000001", b"a\0b", b"x" * 5000],
)
def test_a_damaged_pointer_is_ignored_aloud(tmp_path, pointer, caplog):
    """A damaged pointer is ignored aloud and the last step is the newest."""
    for step in (2, 1):
        publish(tmp_path, step)
    (tmp_path / "latest").write_bytes(pointer)
    assert order(tmp_path) == [name(2), name(1)]
    assert "latest is ignored: it " in caplog.text
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    assert order(tmp_path) == [name(2), name(1)]


@pytest.mark.parametrize(("call", "is_published"), [("rename", False), ("replace_durably", True)])
def test_a_writer_that_is_killed_while_it_publishes_leaves_the_checkpoint_before(
    tmp_path, monkeypatch, call, is_published
):
    publish(tmp_path, 1)
    draft = open_draft(tmp_path, 2)

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, call) if call == "rename" else (folder_module, call)), killed)
        patch.setattr(folder_module.CheckpointDraft, "_take_back", killed)  # a killed process does nothing any more
        with pytest.raises(Killed):
            draft.publish(manifest(step=2), None)
    assert order(tmp_path) == [name(1), *[name(2)] * is_published]
    os.close(draft._lock)  # as the end of the process does
    publish(tmp_path, 3)
    assert order(tmp_path) == [name(3), *[name(2)] * is_published, name(1)]
    assert not draft.path.exists()


def _publish_with_a_fault(root, number):
    """Publish a second checkpoint, with an error in one of the writes to the disk. Return whether there was one."""
    publish(root, 1)
    draft, fsync, left = open_draft(root, 2), os.fsync, iter(range(number, -1, -1))

    def fail(descriptor):
        if next(left, None) == 0:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    with mock.patch.object(os, "fsync", fail):
        try:
            draft.publish(manifest(step=2), None)
        except OSError:
            draft.discard()
            return True
    return False


def test_a_checkpoint_whose_save_failed_is_not_published(tmp_path):
    num_faults = 0
    while _publish_with_a_fault(root := tmp_path / f"{num_faults}", num_faults):
        assert (order(root), names(root)) == ([name(1)], {name(1), "latest"})
        assert (root / "latest").read_text() == name(1)
        num_faults += 1
    assert order(root) == [name(2), name(1)]
    assert num_faults == 5


def test_a_draft_stays_while_its_writer_lives_and_goes_after_its_death(tmp_path):
    reads, writes = os.pipe()
    writer = os.fork()
    if writer == 0:
        with suppress(BaseException):
            os.write(writes, str(open_draft(tmp_path, 7).path).encode())
            signal.pause()
        os._exit(1)
    os.close(writes)
    try:
        draft = Path(os.read(reads, 4096).decode())
        assert publish(tmp_path, 7).name == f"{name(7)}_2"  # the other job's draft has the first name
        assert draft.is_dir()
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        os.close(reads)
    publish(tmp_path, 2)
    assert names(tmp_path) == {f"{name(7)}_2", name(2), "latest"}


def _published_beside_clean_ups(root, number):
    """Publish a checkpoint. After one opening of a file, and each write, another job begins to save the same step.

    Return whether there was such an opening.
    """
    publish(root, 1)
    openings = iter(range(number, -1, -1))

    def with_clean_up(function, is_moment):
        def call(*args, **options):
            result = function(*args, **options)
            if is_moment():
                clean_up()
            return result

        return call

    def clean_up():
        with mock.patch.multiple(os, **original):
            open_draft(root, 2).discard()

    original = {"open": os.open, "fsync": os.fsync}
    opened = with_clean_up(os.open, lambda: next(openings, None) == 0)
    with mock.patch.multiple(os, open=opened, fsync=with_clean_up(os.fsync, lambda: True)):
        publish(root, 2)
    return next(openings, None) is None


def test_clean_ups_of_another_job_harm_no_save(tmp_path):
    number = 0
    while _published_beside_clean_ups(root := tmp_path / f"{number}", number):
        assert order(root) == [name(2), name(1)]
        assert names(root) == {name(2), name(1), "latest"}
        assert names(root / name(2)) == {MANIFEST}
        number += 1
    assert number > 3


def test_a_writer_waits_for_a_clean_up_that_holds_its_lock(tmp_path, monkeypatch):
    lock = os.open(tmp_path / f".draft-{name(1)}.writer", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(lock, fcntl.LOCK_UN))
    assert publish(tmp_path, 1).name == name(1)
    os.close(lock)


@pytest.mark.timeout(20)
def test_leftovers_of_every_kind_go_and_nothing_else(tmp_path):
    (tmp_path / ".draft-step_00000002").mkdir()
    (tmp_path / ".draft-step_00000002.writer").touch()
    (tmp_path / ".draft-step_00000003.writer").touch()  # of a draft that was published
    (tmp_path / ".removed-step_00000001").mkdir()
    (tmp_path / ".removed-step_00000001" / "file").write_text("x")
    kept = {"step_size_0.1", "notes", ".hidden", "step_1_backup"}
    for folder in kept:
        (tmp_path / folder).mkdir()
    (tmp_path / ".draft-x").write_text("a file")
    os.mkfifo(tmp_path / ".draft-y")
    (tmp_path / "step_00000005").write_text("a file")
    (tmp_path / "step_00000006").symlink_to("nowhere")
    kept |= {".draft-x", ".draft-y", "step_00000005", "step_00000006"}
    publish(tmp_path, 1)
    assert names(tmp_path) == {*kept, name(1), "latest"}
    assert publish(tmp_path, 6).name == f"{name(6)}_2"
    assert order(tmp_path) == [f"{name(6)}_2", name(1)]


def test_a_draft_that_is_discarded_or_cannot_be_opened_leaves_nothing(tmp_path, monkeypatch):
    draft = open_draft(tmp_path / "new" / "folder", 1)
    (draft.path / "file").write_text("x")
    draft.discard()
    real = os.open

    def open_or_fail(path, *args):
        if Path(path).name.endswith(".writer"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args)

    monkeypatch.setattr(os, "open", open_or_fail)
    with pytest.raises(OSError, match="No space left"):
        open_draft(tmp_path / "new" / "folder", 2)
    assert names(tmp_path / "new" / "folder") == set()


def test_pruning_keeps_the_newest_of_its_run_later_steps_and_other_runs(tmp_path, caplog):
    for step in (1, 2, 3, 9):
        publish(tmp_path, step)
    publish(tmp_path, 4, run="b", keep=1)
    (tmp_path / name(1) / MANIFEST).write_text("{}")  # whose it was is not known
    publish(tmp_path, 5, keep=2)  # after going back from 9
    assert order(tmp_path) == [name(step) for step in (5, 4, 3, 1, 9)]
    publish(tmp_path, 5, keep=2)
    assert order(tmp_path) == [f"{name(5)}_2", *(name(step) for step in (5, 4, 1, 9))]
    assert not caplog.records


def test_a_checkpoint_that_cannot_be_removed_does_not_fail_the_save(tmp_path, caplog, monkeypatch):
    publish(tmp_path, 1)
    rename = Path.rename

    def refuse(path, target):
        if path.name == name(1):
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    publish(tmp_path, 2, keep=1)
    assert order(tmp_path) == [name(2), name(1)]
    assert (
        f"{name(2)} is saved, but {tmp_path / name(1)} is not among the newest 1 and cannot be removed" in caplog.text
    )


def test_without_locks_drafts_stay_and_all_is_published(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = open_draft(tmp_path, 1), open_draft(tmp_path, 1)
    for draft in (first, second):
        draft.publish(manifest(step=1), 1)
    assert names(tmp_path) == {f"{name(1)}_2", "latest"}


def test_a_checkpoint_is_known_by_name_or_manifest(tmp_path):
    renamed = publish(tmp_path, 1).rename(tmp_path / "best")
    empty = tmp_path / name(2)
    empty.mkdir()
    run = tmp_path / "step_by_step"  # a folder of checkpoints, whatever it is called
    run.mkdir()
    publish(run, 1)
    assert [is_checkpoint(p) for p in (renamed, empty, run, tmp_path)] == [True, True, False, False]


def test_steps_of_up_to_20_digits_are_found(tmp_path):
    for step in (time.time_ns(), 10**20 - 1):
        path = publish(tmp_path, step)
        assert latest_checkpoint(tmp_path) == path


def test_a_folder_that_cannot_be_read_is_a_checkpoint_error(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "find_checkpoints", lambda _: (_ for _ in ()).throw(PermissionError("denied")))
    with pytest.raises(zeroamp.CheckpointError, match="cannot be read: denied. Check the path"):
        latest_checkpoint(tmp_path)
