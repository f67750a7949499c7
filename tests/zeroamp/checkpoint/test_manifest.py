"""The manifest: what is refused in one whose digest fits, and how damage is named."""

import errno
import itertools
import random
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.zeroamp.checkpoint.checkpoint_files import FILES, manifest, rewrite_manifest
from zeroamp.checkpoint.manifest import (
    Chunk,
    DamagedCheckpointError,
    FileRecord,
    Layout,
    RemovedCheckpointError,
    check_file,
    rank_file,
    read_manifest,
    record_file,
)
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.files import MANIFEST

RECORD = {"num_bytes": 1, "sha256": "0" * 64}


@pytest.fixture
def checkpoint(tmp_path):
    files = FILES | {rank_file(rank): FILES["train.pt"] for rank in range(4)}
    content = manifest(
        mesh=(2, 2), world_size=4, files=files, config={"b": [1, 2.5, None], "a": {"é": True}}, versions={"t": "1"}
    )
    (tmp_path / MANIFEST).write_text(content.to_json())
    return tmp_path


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    chunks = (Chunk((0, 0), (1, 3), "x.pt", 0, 3), Chunk((1, 0), (1, 3), "x.pt", 0, 1))
    written = manifest(
        files=FILES | {"x.pt": FileRecord(num_bytes=3, sha256="f" * 64)}, mesh=(1, 1), config={"a": {"b": 1e-5}},
        tensors={"t": Layout(dtype="bfloat16", shape=(2, 3), chunks=chunks), "scalar": Layout(
            dtype="int64", shape=(), chunks=(Chunk((), (), "x.pt", 1, 2),)), "empty": Layout(
            dtype="bool", shape=(0, 2), chunks=())},
    )  # fmt: skip
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
        check_file(tmp_path / "file", FileRecord(num_bytes=0, sha256="0" * 64))


@pytest.mark.timeout(20)
def test_a_manifest_that_is_no_regular_file_is_damage(tmp_path):
    (tmp_path / MANIFEST).symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpointError, match="not a regular file"):
        read_manifest(tmp_path)


def test_another_format_is_no_damage(checkpoint):
    rewrite_manifest(checkpoint, lambda content: content.update(format=1))
    with pytest.raises(CheckpointError, match=r"must have format 3 or 2, .*version of zeroamp") as raised:
        read_manifest(checkpoint)
    assert type(raised.value) is CheckpointError


def _grid(shape, cuts):
    """Return the chunks of a tensor that is cut at places of each dimension."""
    intervals = [
        list(itertools.pairwise(sorted({0, length, *places}))) for length, places in zip(shape, cuts, strict=True)
    ]
    return [
        Chunk(tuple(a for a, _ in block), tuple(b - a for a, b in block), "train.pt", 0, 1)
        for block in itertools.product(*intervals)
    ]


def test_chunks_fill_a_tensor_exactly_once_or_are_refused():
    """Against a count of every element, on random grids with a chunk moved, resized, removed or added."""
    generator, num_refused = random.Random(0), 0
    for _ in range(400):
        shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(1, 3)))
        chunks = _grid(shape, [generator.sample(range(length), generator.randint(0, length)) for length in shape])
        for _ in range(generator.randint(0, 2)):
            index, kind = generator.randrange(len(chunks)), generator.choice(["move", "resize", "remove", "add"])
            values = [generator.randint(0, 6) for _ in shape]
            if kind in ("move", "resize"):
                chunks[index] = chunks[index]._replace(**{"offsets" if kind == "move" else "shape": tuple(values)})
            elif kind == "remove" and len(chunks) > 1:
                del chunks[index]
            elif kind == "add":
                chunks.append(chunks[index])
        counts, is_inside = Counter(), True
        for chunk in chunks:
            cells = list(itertools.product(*(range(a, a + n) for a, n in zip(chunk.offsets, chunk.shape, strict=True))))
            is_inside &= bool(cells) and all(
                cell < whole for place in cells for cell, whole in zip(place, shape, strict=True)
            )
            counts.update(cells)
        is_filled = is_inside and counts == dict.fromkeys(itertools.product(*map(range, shape)), 1)
        generator.shuffle(chunks)
        with nullcontext() if is_filled else pytest.raises(ValidationError):
            Layout(dtype="float32", shape=shape, chunks=tuple(chunks))
        num_refused += not is_filled
    assert 100 < num_refused < 300


def test_a_checkpoint_that_is_removed_is_named_as_removed(checkpoint):
    """A checkpoint that is removed while it is read is named as removed."""
    found = read_manifest(checkpoint)
    checkpoint.rename(checkpoint.with_name("moved"))
    for read in (
        lambda: read_manifest(checkpoint),
        lambda: check_file(checkpoint / "train.pt", found.files["train.pt"]),
    ):
        with pytest.raises(RemovedCheckpointError, match="was removed while it was read, .*keep=.*Load again"):
            read()
