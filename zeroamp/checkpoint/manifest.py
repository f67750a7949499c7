"""The files of one checkpoint: their names, and the manifest with their digests and the layout of the tensors.

zeroamp.json     the manifest: step, run, config and mesh of the checkpoint; size and SHA-256 of every other file;
                 dtype, shape and chunks of every tensor
*.distcp         written by torch.distributed.checkpoint: the tensors, in chunks
.metadata        torch's own description of them, for other readers. It is a pickle, and never read here
train.pt         values that are the same on all ranks
rank_00000.pt    values of one rank: random state, `extra`, and its tensors that are not sharded

Nothing in a manifest is believed: before a file is opened, each tensor's chunks must fill it exactly once, and must be
inside of files that the manifest lists.
"""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.policies.json_values import once_each
from zeroamp.weights.files import MANIFEST
from zeroamp.weights.untrusted_files import is_file_name, leads_out, open_regular, read_regular

METADATA = ".metadata"
"""Written by torch for its own readers."""
VALUES = "train.pt"
"""Step counts, and one scheduler and one description per optimizer, the same on all ranks."""
FORMAT = 3
OLD_FORMAT = 2
"""Its manifest lacks the layout: see `format2.py`."""
_DIGEST = "sha256"
_MAX_BYTES = 1024**3  # of a manifest: a chunk of a tensor takes about 60 bytes
_RANK_FILE = re.compile(r"rank_\d+\.pt")
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)
"""Of a file that is missing, not regular or too large. Others (EIO, ESTALE, EACCES) may be gone at the next read."""


def rank_file(rank: int) -> str:
    """Return the name of the file that holds one rank's own values."""
    return f"rank_{rank:05d}.pt"


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cut short or changed. An earlier checkpoint may be whole."""


class RemovedCheckpointError(DamagedCheckpointError):
    """The whole checkpoint was removed while it was read."""


def _file_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError("must be the name of a file in the checkpoint's own folder")
    return name


def _dtype_name(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError("must be the name of a dtype of torch")
    return name


FileName = Annotated[str, AfterValidator(_file_name)]
Count = Annotated[int, Field(ge=0)]
_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and digest of one file of a checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    num_bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Chunk(NamedTuple):
    """A block of a tensor, and where in which file a tensor of `torch.save` has its values."""

    offsets: tuple[Count, ...]
    """Of its first element, one per dimension."""
    shape: tuple[Count, ...]
    file: FileName
    start: Count
    """In bytes, from the beginning of the file."""
    num_bytes: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Dtype and shape of a whole tensor, and its chunks, which are never empty."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    dtype: Annotated[str, AfterValidator(_dtype_name)]
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of `zeroamp.json`: step, run, config and mesh of a checkpoint, and the record of each of its files."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    step: Count
    """The number of the step, as the caller gave it."""
    run: str
    """Name of the training run, over all its restarts."""
    world_size: Annotated[int, Field(ge=1)]
    mesh: tuple[Annotated[int, Field(ge=1)], ...]
    config: dict[str, Any]
    """The policy, as a config that `policy_from_config` reads."""
    versions: dict[str, str]
    """Versions of torch and zeroamp."""
    files: Mapping[FileName, FileRecord]
    tensors: Mapping[str, Layout] | None = None
    """Name -> where the values of a tensor are. Format 2 lacks it."""

    def to_json(self) -> str:
        """Return the text of the file, which ends with a digest of the rest. Each value has a line of its own."""
        content = {"format": FORMAT, **asdict(self)}
        content[_DIGEST] = _digest(content)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        return f"{{\n{lines}\n}}"

    def problem(self) -> str | None:
        """Return what contradicts what in this manifest, or None."""
        if math.prod(self.mesh) != self.world_size:
            return f"mesh: {self.mesh} has not the {self.world_size} ranks of world_size"
        of_ranks = sum(_RANK_FILE.fullmatch(name) is not None for name in self.files)
        if of_ranks != self.world_size or any(rank_file(rank) not in self.files for rank in range(of_ranks)):
            return f"files: must have one file for each of {self.world_size} ranks, but has {of_ranks}"
        if VALUES not in self.files:
            return f"files: must have {VALUES}"
        return layout_problem(self.tensors or {}, self.files)


def layout_problem(tensors: Mapping[str, Layout], files: Mapping[str, FileRecord]) -> str | None:
    """Return which tensor is not filled exactly once from inside of `files`, and why, or None."""
    for name, layout in tensors.items():
        for chunk in layout.chunks:
            record = files.get(chunk.file)
            if record is None:
                return f"tensors.{name}: {chunk.file} is not one of the checkpoint's files"
            if chunk.start + chunk.num_bytes > record.num_bytes:
                return f"tensors.{name}: a chunk ends after the {record.num_bytes} bytes of {chunk.file}"
        if not _fill_once(layout.shape, layout.chunks):
            return f"tensors.{name}: its chunks must fill the shape {list(layout.shape)} exactly once"
    return None


def _fill_once(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Return whether chunks are inside of a shape, are not empty, do not overlap, and have as many elements in all."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.shape) == len(shape) or 0 in chunk.shape:
            return False
        if any(start + length > whole for start, length, whole in zip(chunk.offsets, chunk.shape, shape, strict=True)):
            return False
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        return False
    if len(chunks) < 2 or not shape:
        return True
    # Only chunks whose intervals overlap in the dimension that separates most of them are compared.
    axis = max(range(len(shape)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets[axis])
    for number, chunk in enumerate(ordered):
        end = chunk.offsets[axis] + chunk.shape[axis]
        for other in ordered[number + 1 :]:
            if other.offsets[axis] >= end:
                break
            if _overlap(chunk, other):
                return False
    return True


def _overlap(one: Chunk, other: Chunk) -> bool:
    pairs = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    return all(start < their + theirs and their < start + length for start, length, their, theirs in pairs)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint. In format 2, `tensors` is None: `format2.py` reads them.

    Raises:
        DamagedCheckpointError: the manifest is missing, damaged or contradicts itself.
        CheckpointError: the manifest has another format.
        OSError: the manifest could not be read this time.
    """
    path = checkpoint / MANIFEST
    try:
        text = read_regular(path, _MAX_BYTES).decode()
        content: dict[str, Any] = json.loads(text, object_pairs_hook=once_each)
        is_whole = content.pop(_DIGEST) == _digest(content)
    except OSError as error:
        _refuse_damage(path, error)
        raise
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damage(path, f"{type(error).__name__}: {error}") from error
    if not is_whole:
        raise _damage(path, "its text does not match its own digest")
    if (found := content.pop("format", None)) not in (FORMAT, OLD_FORMAT) or type(found) is not int:
        raise CheckpointError(
            f"{path} must have format {FORMAT} or {OLD_FORMAT}, but has another one. Use the version of zeroamp that "
            "wrote it."
        )
    if ("tensors" in content) != (found == FORMAT):
        raise _damage(path, f"tensors: must be there from format {FORMAT} on, and not before")
    try:
        manifest = _manifest_adapter().validate_json(json.dumps(content))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise _damage(path, some_of(problems)) from error
    if (problem := manifest.problem()) is not None:
        raise _damage(path, problem)
    return manifest


@cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def validated_layouts(layouts: dict[str, Any]) -> dict[str, Layout]:
    """Return layouts that were given as plain values. Raise ValueError if one has a wrong type."""
    return TypeAdapter(dict[str, Layout]).validate_json(json.dumps(layouts))


def record_file(path: Path) -> FileRecord:
    """Return size and digest of a file."""
    with open_regular(path) as file:
        return FileRecord(num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def check_file(path: Path, record: FileRecord) -> None:
    """Check that a file is inside the checkpoint, and has the recorded size and digest.

    Raises:
        DamagedCheckpointError: the file is another one, or is missing.
        OSError: the file could not be read this time.
    """
    if leads_out(path):
        raise _damage(path, "a link that leads out of the checkpoint")
    try:
        found = record_file(path)
    except OSError as error:
        _refuse_damage(path, error)
        raise
    if found != record:
        was = f"{record.num_bytes} bytes, sha256 {record.sha256}"
        raise _damage(path, f"{found.num_bytes} bytes, sha256 {found.sha256} instead of {was}")


def _refuse_damage(path: Path, error: OSError) -> None:
    if error.errno in _DAMAGE:
        raise _damage(path, str(error)) from error


def _damage(path: Path, found: str) -> DamagedCheckpointError:
    return removed(path.parent) or DamagedCheckpointError(
        f"{path} is damaged: {found}. Load another checkpoint, or copy the file again."
    )


def removed(checkpoint: Path) -> RemovedCheckpointError | None:
    """Return the error for a checkpoint that is gone after a load found it, or None if it is still there."""
    if os.path.isdir(checkpoint):
        return None
    return RemovedCheckpointError(
        f"{checkpoint} was removed while it was read, as a save with keep= removes old checkpoints. Load again, or "
        "save with a larger keep."
    )
