"""The manifest: what is refused in one whose digest fits, and how damage is named."""

import errno
from contextlib import suppress
from pathlib import Path

import pytest

from tests.zeroamp.checkpoint.checkpoint_files import manifest, rewrite_manifest
from zeroamp.checkpoint.manifest import DamagedCheckpointError, FileRecord, check_file, read_manifest, record_file
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.files import MANIFEST

RECORD = {"num_bytes": 1, "sha256": "0" * 64}


@pytest.fixture
def checkpoint(tmp_path):
    content = manifest(mesh=(2, 2), world_size=4, config={"b": [1, 2.5, None], "a": {"é": True}}, versions={"t": "1"})
    (tmp_path / MANIFEST).write_text(content.to_json())
    return tmp_path


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    written = manifest(files={"x.pt": FileRecord(num_bytes=3, sha256="f" * 64)}, mesh=(2, 2), config={"a": {"b": 1e-5}})
    (tmp_path / MANIFEST).write_text(written.to_json())
    assert read_manifest(tmp_path) == written


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({"files": {name: RECORD}}, r"files\..*own folder")
            for name in ("../../etc/passwd", "/etc/passwd", "..", "", "a\0b", "step_00000001/../x")
        ),
        *(({key: None}, f"{key}: ") for key in ("step", "run", "world_size", "mesh", "config", "versions", "files")),
        ({"unknown": 1}, "unknown: "),
        ({"step": "1"}, "step: "),
        ({"mesh": ["4"]}, "mesh.0: "),
        ({"files": {"x": 1}}, "files.x: "),
        ({"files": {"x": {"num_bytes": 1}}}, "files.x.sha256: "),
        ({"versions": {"torch": 2}}, "versions.torch: "),
    ],
)
def test_a_wrong_value_is_named_though_the_digest_fits(checkpoint, changes, words):
    rewrite_manifest(checkpoint, lambda content: content.update(changes))
    with pytest.raises(DamagedCheckpointError, match=words):
        read_manifest(checkpoint)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"3", b"{}", b"\xff\xff", b"[" * 100_000, b'"sha256"'])
def test_what_is_no_manifest_is_damage(tmp_path, text):
    with pytest.raises(DamagedCheckpointError, match="zeroamp.json is damaged: .*No such file"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(DamagedCheckpointError, match="zeroamp.json is damaged: "):
        read_manifest(tmp_path)


def test_any_changed_byte_of_a_manifest_is_damage_or_the_same_manifest(checkpoint):
    whole = read_manifest(checkpoint)
    text = (checkpoint / MANIFEST).read_bytes()
    for position in range(len(text)):
        changed = bytes([*text[:position], text[position] ^ (1 << position % 8), *text[position + 1 :]])
        (checkpoint / MANIFEST).write_bytes(changed)
        with suppress(DamagedCheckpointError):
            assert read_manifest(checkpoint) == whole  # a line break that became another white space


def test_a_file_is_checked_by_length_and_digest(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    record = record_file(path)
    check_file(path, record)
    for content, words in (
        (b"ab", "2 bytes, .* instead of 3 bytes"),
        (b"abd", "3 bytes, sha256 .* instead of 3 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=words):
            check_file(path, record)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match="No such file"):
        check_file(path, record)
    path.mkdir()
    with pytest.raises(DamagedCheckpointError):
        check_file(path, record)


def test_an_error_of_the_file_system_is_no_damage(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        Path, "stat", lambda path, **_: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle"))
    )
    with pytest.raises(OSError, match="Stale file handle"):
        check_file(tmp_path / "file", FileRecord(num_bytes=0, sha256=""))


@pytest.mark.timeout(20)
def test_a_manifest_that_is_no_regular_file_is_damage(tmp_path):
    (tmp_path / MANIFEST).symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpointError, match="not a regular file"):
        read_manifest(tmp_path)


def test_another_format_is_no_damage(checkpoint):
    rewrite_manifest(checkpoint, lambda content: content.update(format=1))
    with pytest.raises(CheckpointError, match=r"must have format 2.*version of zeroamp") as raised:
        read_manifest(checkpoint)
    assert type(raised.value) is CheckpointError
