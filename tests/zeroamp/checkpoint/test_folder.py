"""A folder of checkpoints: which is the newest, what a killed writer leaves, and what pruning removes. No ranks."""

import errno
import fcntl
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.zeroamp.checkpoint.checkpoint_files import manifest, rewrite_manifest
from zeroamp import latest_checkpoint
from zeroamp.checkpoint import manifest as checkpoint_manifest
from zeroamp.checkpoint.folder import find_checkpoints, is_checkpoint, open_draft
from zeroamp.checkpoint.manifest import read_manifest
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.files import MANIFEST
from zeroamp.weights.untrusted_files import read_json


class Killed(BaseException):
    pass


def publish(root, step, keep=None, run="a", parent=None):
    """As a run does that was never started again: its checkpoints descend from one another."""
    if parent is None:
        found = [there for path in root.iterdir() if (there := _manifest_of(path)) and there.run == run]
        parent = max((there.serial for there in found), default=0)
    draft = open_draft(root, step)
    return draft.publish(lambda serial: manifest(step=step, serial=serial, run=run, parent=parent), keep)


def _manifest_of(path):
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def order(root):
    return [path.name for path in find_checkpoints(root)]


def names(root):
    return {path.name for path in root.iterdir()}


def no_locks(monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_the_newest_is_the_one_published_last_whatever_its_step(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nothing") is None
    for step in (200, 300, 100):
        publish(tmp_path, step)
    assert order(tmp_path) == ["step_00000100", "step_00000300", "step_00000200"]
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "step_00000100"
    assert (tmp_path / "latest").read_text() == "3 step_00000100 2"
    assert names(tmp_path) == {*order(tmp_path), "latest", ".lock"}


def test_the_pointer_goes_back_and_what_came_after_it_comes_last(tmp_path):
    for step in (1, 2, 3, 4):
        publish(tmp_path, step)
    (tmp_path / "latest").write_text("step_00000002\n")
    assert order(tmp_path) == [f"step_0000000{step}" for step in (2, 1, 4, 3)]
    assert publish(tmp_path, 3).name == "step_00000003_2"  # what was there stays as it was
    assert order(tmp_path) == ["step_00000003_2", *(f"step_0000000{step}" for step in (4, 3, 2, 1))]
    assert read_manifest(tmp_path / "step_00000003_2").serial == 5


@pytest.mark.parametrize(
    "pointer",
    [
        b"",
        b"step_00000009",
        b"\xff\xfe\x00",
        b"../other/step_00000001",
        b"/",
        b".",
        b"a\0b",
        b"x" * 5000,
        b"two\nlines",
    ],
)
def test_a_damaged_pointer_leaves_the_order_of_publication(tmp_path, pointer):
    for step in (1, 2):
        publish(tmp_path, step)
    (tmp_path / "latest").write_bytes(pointer)
    assert order(tmp_path) == ["step_00000002", "step_00000001"]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    assert order(tmp_path) == ["step_00000002", "step_00000001"]


def test_killed_between_pointer_and_rename(tmp_path, monkeypatch):
    publish(tmp_path, 1)
    draft = open_draft(tmp_path, 2)

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            draft.publish(lambda serial: manifest(step=2, serial=serial, parent=0), None)
    assert (tmp_path / "latest").read_text() == "2 step_00000002 0"  # which is not there
    assert order(tmp_path) == ["step_00000001"]
    publish(tmp_path, 3)
    assert order(tmp_path) == ["step_00000003", "step_00000001"]
    assert not draft.path.exists()  # it had no writer any more


WRITER = """
import sys
from pathlib import Path
from zeroamp.checkpoint.folder import open_draft
print(open_draft(Path(sys.argv[1]), 7).path, flush=True)
sys.stdin.read()
"""


def test_a_draft_stays_while_its_writer_lives_and_goes_after_its_death(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        draft = Path(writer.stdout.readline().strip())
        publish(tmp_path, 1)
        assert draft.is_dir()
        writer.kill()
        writer.wait()
    publish(tmp_path, 2)
    assert names(tmp_path) == {"step_00000001", "step_00000002", "latest", ".lock"}


def test_leftovers_of_every_kind_go_and_nothing_else(tmp_path):
    tmp_path.joinpath(".draft-step_00000001-0").mkdir()
    tmp_path.joinpath(".removed-step_00000001-0").mkdir()
    tmp_path.joinpath(".removed-step_00000001-0", "file").write_text("x")
    tmp_path.joinpath(".latest-0").write_text("x")
    kept = {"step_size_0.1", "notes", ".hidden", "step_1_backup"}
    for name in kept:
        tmp_path.joinpath(name).mkdir()
    tmp_path.joinpath("step_00000005").write_text("a file")
    publish(tmp_path, 1)
    assert names(tmp_path) == {*kept, "step_00000001", "step_00000005", "latest", ".lock"}
    assert order(tmp_path) == ["step_00000001"]


def test_a_draft_that_is_discarded_leaves_nothing(tmp_path):
    draft = open_draft(tmp_path / "new" / "folder", 1)
    (draft.path / "file").write_text("x")
    draft.discard()
    draft.discard()
    assert names(tmp_path / "new" / "folder") == {".lock"}


def test_a_draft_that_cannot_be_opened_leaves_nothing(tmp_path, monkeypatch):
    publish(tmp_path, 1)
    before = names(tmp_path)
    real = os.open

    def open_or_fail(path, *args):
        if Path(path).name == ".writer":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args)

    monkeypatch.setattr(os, "open", open_or_fail)
    with pytest.raises(OSError, match="No space left"):
        open_draft(tmp_path, 2)
    assert names(tmp_path) == before


def test_pruning_keeps_the_newest_of_its_own_run_and_what_others_have(tmp_path, caplog):
    publish(tmp_path, 1, run="other")
    for step in (4, 3, 2):
        publish(tmp_path, step)
    damaged = publish(tmp_path, 9)
    (damaged / MANIFEST).write_text("{")
    publish(tmp_path, 5, keep=2)
    assert order(tmp_path) == ["step_00000005", "step_00000002", "step_00000001", "step_00000009"]
    publish(tmp_path, 6, keep=1)
    assert order(tmp_path) == ["step_00000006", "step_00000001", "step_00000009"]
    (message,) = {record.getMessage() for record in caplog.records}
    assert re.search(rf"{damaged}/zeroamp.json is damaged", message)


def test_what_cannot_be_pruned_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    publish(tmp_path, 1)
    real = Path.rename

    def rename(self, target):
        if Path(target).name.startswith(".removed-"):
            raise PermissionError(errno.EACCES, "not yours")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with caplog.at_level(logging.WARNING, "zeroamp"):
        publish(tmp_path, 2, keep=1)
    assert order(tmp_path) == ["step_00000002", "step_00000001"]
    assert re.search("step_00000001 .*newest 1, .*not yours", caplog.text)


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    assert [publish(tmp_path, 3).name for _ in range(3)] == ["step_00000003", "step_00000003_2", "step_00000003_3"]
    assert publish(tmp_path, -1).name == "step_-0000001"
    assert publish(tmp_path, 123456789012).name == "step_123456789012"
    assert len(order(tmp_path)) == 5


def test_an_unreadable_manifest_comes_last_and_a_newer_format_first(tmp_path):
    for step in (1, 2, 3):
        publish(tmp_path, step)
    (tmp_path / "step_00000003" / MANIFEST).write_bytes(b"\xff")
    assert order(tmp_path) == ["step_00000002", "step_00000001", "step_00000003"]
    (tmp_path / "latest").write_text("step_00000003")
    assert order(tmp_path) == ["step_00000002", "step_00000001", "step_00000003"]
    rewrite_manifest(tmp_path / "step_00000001", lambda content: content.update(format=2))
    (tmp_path / "latest").unlink()
    assert order(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]  # never silently an older one
    with pytest.raises(CheckpointError, match="format 1"):
        read_manifest(tmp_path / "step_00000001")
    publish(tmp_path, 4)
    assert order(tmp_path)[0] == "step_00000004"


@contextmanager
def unreadable(monkeypatch, checkpoint):
    def read(path):
        if path.parent == checkpoint:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read_json(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_manifest, "read_json", read)
        yield


def test_a_manifest_that_cannot_be_read_now_is_no_damage(tmp_path, monkeypatch):
    paths = [publish(tmp_path, step) for step in (1, 2, 3)]
    for path in paths:
        draft = open_draft(tmp_path, 4)
        with (
            unreadable(monkeypatch, path),
            pytest.raises(CheckpointError, match=rf"{path}/{MANIFEST} could not be read .*Stale file.*try again"),
        ):
            draft.publish(lambda serial: manifest(step=4, serial=serial, parent=3), None)
        draft.discard()
    assert order(tmp_path) == [path.name for path in paths[::-1]]
    with unreadable(monkeypatch, paths[2]):  # `latest` names it
        assert order(tmp_path) == ["step_00000003", "step_00000002", "step_00000001"]
    with unreadable(monkeypatch, paths[1]):
        assert order(tmp_path) == ["step_00000003", "step_00000001", "step_00000002"]


def test_a_checkpoint_is_known_by_name_or_manifest(tmp_path):
    path = publish(tmp_path, 1)
    renamed = path.rename(tmp_path / "best")
    empty = tmp_path / "step_00000002"
    empty.mkdir()
    run = tmp_path / "step_by_step"  # a folder of checkpoints, whatever it is called
    run.mkdir()
    publish(run, 1)
    assert [is_checkpoint(p) for p in (renamed, empty, run, tmp_path)] == [True, True, False, False]


def test_without_locks_nothing_is_removed_and_all_is_published(tmp_path, monkeypatch):
    no_locks(monkeypatch)
    leftovers = {".draft-step_00000001-0", ".removed-step_00000001-0"}
    for name in leftovers:
        (tmp_path / name).mkdir()
    first = open_draft(tmp_path, 1)
    second = open_draft(tmp_path, 1)
    first.publish(lambda serial: manifest(step=1, serial=serial, parent=0), 1)
    second.publish(lambda serial: manifest(step=1, serial=serial, parent=1), 1)
    assert order(tmp_path) == ["step_00000001_2"]
    assert leftovers < names(tmp_path)


def test_the_manifest_is_written_before_the_checkpoint_has_its_name(tmp_path):
    path = publish(tmp_path, 1)
    assert {file.name for file in path.iterdir()} == {MANIFEST}
    assert json.loads((path / MANIFEST).read_text())["serial"] == 1


def test_a_line_that_was_left_is_neither_taken_nor_removed(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        publish(tmp_path, step)
    assert publish(tmp_path, 4, keep=2, parent=1).name == "step_00000004"  # after going back to 1
    assert order(tmp_path) == [f"step_0000000{step}" for step in (4, 1, 3, 2)]
    publish(tmp_path, 5, keep=2, parent=4)
    assert order(tmp_path) == [f"step_0000000{step}" for step in (5, 4, 3, 2)]


def test_a_writer_that_did_not_come_to_the_rename_leaves_the_line_that_it_was_on(tmp_path, monkeypatch):
    for step in (1, 2):
        publish(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(OSError, match="no"):
            publish(tmp_path, 3, parent=1)
    assert (tmp_path / "latest").read_text() == "3 step_00000003 1"
    assert order(tmp_path)[0] == "step_00000001"


@pytest.mark.timeout(20)
def test_what_others_left_neither_hides_checkpoints_nor_fails_a_save(tmp_path, caplog):
    publish(tmp_path, 1)
    (tmp_path / ".draft-x").write_text("a file")
    os.mkfifo(tmp_path / ".draft-y")
    (tmp_path / ".removed-x").write_text("a file")
    (tmp_path / ".latest-x").mkdir()
    (tmp_path / "step_00000002").symlink_to("nowhere")
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    assert order(tmp_path) == ["step_00000001"]
    assert "latest is ignored: it cannot be read" in caplog.text
    assert publish(tmp_path, 2).name == "step_00000002_2"
    assert (tmp_path / "latest").read_text() == "2 step_00000002_2 1"
    assert (tmp_path / ".draft-x").read_text() == "a file"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_manifest_that_is_no_regular_file_is_damage(tmp_path, kind):
    for step in (1, 2):
        publish(tmp_path, step)
    path = tmp_path / "step_00000002" / MANIFEST
    path.unlink()
    {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    assert order(tmp_path) == ["step_00000001", "step_00000002"]
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_manifest(tmp_path / "step_00000002")


def _num_calls(action):
    """Return how many functions of Python an action calls: its own work, whatever the machine does besides."""
    num_calls = 0

    def count(_, event, __):
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return num_calls


def test_the_work_grows_with_the_number_of_checkpoints_and_not_with_its_square(tmp_path):
    """The line of ancestors is looked for among all; pruning and publishing read each manifest once."""
    calls = {}
    for num_checkpoints in (50, 200):
        root = tmp_path / str(num_checkpoints)
        root.mkdir()
        for serial in range(1, num_checkpoints + 1):
            (root / f"step_{serial:08d}").mkdir()
            content = manifest(step=serial, serial=serial, parent=serial - 1).to_json()
            (root / f"step_{serial:08d}" / MANIFEST).write_text(content)
        calls[num_checkpoints] = (
            _num_calls(lambda root=root: find_checkpoints(root)),
            _num_calls(lambda root=root, n=num_checkpoints: publish(root, n + 1, keep=n + 1, parent=n)),
        )
    for few, many in zip(*calls.values(), strict=True):
        assert many < 4.5 * few


def test_damaged_parents_that_lead_in_a_circle_end(tmp_path):
    for step in (1, 2):
        publish(tmp_path, step)
    rewrite_manifest(tmp_path / "step_00000001", lambda content: content.update(parent=2))
    assert order(tmp_path) == ["step_00000002", "step_00000001"]
