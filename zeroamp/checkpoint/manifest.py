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
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from zeroamp.checkpoint.torch_metadata import layouts_in
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
"""Its manifest lacks the layout, which is read from `.metadata`."""
_DIGEST = "sha256"
_MAX_BYTES = 1024**3  # of a manifest: a chunk of a tensor takes about 60 bytes
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
Count = Annotated[StrictInt, Field(ge=0)]
Size = Annotated[StrictInt, Field(ge=1)]


class _Checked(BaseModel):
    """Values that are checked when they are made, or read from a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Checked):
    """Size and digest of one file of a checkpoint."""

    num_bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Chunk(NamedTuple):
    """A block of a tensor, and where in which file a tensor of `torch.save` has its values."""

    offsets: tuple[Count, ...]
    """Of its first element, one per dimension."""
    shape: tuple[Size, ...]
    file: FileName
    start: Count
    """In bytes, from the beginning of the file."""
    num_bytes: Count


class Layout(_Checked):
    """Dtype and shape of a whole tensor, and its chunks, which are never empty and fill it exactly once."""

    dtype: Annotated[str, AfterValidator(_dtype_name)]
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @model_validator(mode="after")
    def _is_filled(self) -> "Layout":
        if not _fill_once(self.shape, self.chunks):
            raise ValueError(f"its chunks must fill the shape {list(self.shape)} exactly once")
        return self


class Manifest(_Checked):
    """Content of `zeroamp.json`: step, run, config and mesh of a checkpoint, and the record of each of its files."""

    step: Count
    """The number of the step, as the caller gave it."""
    run: str
    """Name of the training run, over all its restarts."""
    world_size: Size
    mesh: tuple[Size, ...]
    config: dict[str, Any]
    """The policy, as a config that `policy_from_config` reads."""
    versions: dict[str, str]
    """Versions of torch and zeroamp."""
    files: dict[FileName, FileRecord]
    tensors: dict[str, Layout]
    """Name -> where the values of a tensor are."""

    def to_json(self) -> str:
        """Return the text of the file, which ends with a digest of the rest. Each value has a line of its own."""
        content = {"format": FORMAT, **self.model_dump()}
        content[_DIGEST] = _digest(content)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        return f"{{\n{lines}\n}}"

    @model_validator(mode="after")
    def _is_consistent(self) -> "Manifest":
        if math.prod(self.mesh) != self.world_size:
            raise ValueError(f"mesh: {self.mesh} does not have the {self.world_size} ranks of world_size")
        of_ranks = sum(name.startswith("rank_") for name in self.files)
        if of_ranks != self.world_size or any(rank_file(rank) not in self.files for rank in range(of_ranks)):
            raise ValueError(f"files: must have one file for each of {self.world_size} ranks, but has {of_ranks}")
        for name in (VALUES, METADATA):
            if name not in self.files:
                raise ValueError(f"files: must have {name}")
        for name, layout in self.tensors.items():
            for chunk in layout.chunks:
                record = self.files.get(chunk.file)
                if record is None:
                    raise ValueError(f"tensors.{name}: {chunk.file} is not one of the checkpoint's files")
                if chunk.start + chunk.num_bytes > record.num_bytes:
                    raise ValueError(f"tensors.{name}: a chunk ends after the {record.num_bytes} bytes of {chunk.file}")
        return self


def _fill_once(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Return whether chunks fill a shape, are inside of it, and do not overlap.

    They do if the sum of their volumes is the volume of the shape for all choices of distances between coordinates. So
    volumes are measured with a random place of 64 bits for each coordinate. Other chunks have that sum by a chance of
    2**-64 per dimension.
    """
    places: dict[tuple[int, int], int] = defaultdict(lambda: secrets.randbits(64))

    def volume(offsets: Sequence[int], lengths: Sequence[int]) -> int:
        ends = zip(offsets, lengths, strict=True)
        return math.prod(places[dim, at + length] - places[dim, at] for dim, (at, length) in enumerate(ends))

    if any(not len(chunk.offsets) == len(chunk.shape) == len(shape) for chunk in chunks):
        return False
    return sum(volume(chunk.offsets, chunk.shape) for chunk in chunks) == volume([0] * len(shape), shape)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint, and in format 2 torch's own description of the tensors.

    Raises:
        DamagedCheckpointError: the manifest is missing, damaged or contradicts itself, or the description is.
        CheckpointError: the manifest has another format.
        OSError: a file could not be read this time.
    """
    path = checkpoint / MANIFEST
    with _naming_damage(path):
        content = _whole_content(read_regular(path, _MAX_BYTES))
    if (found := content.pop("format", None)) not in (FORMAT, OLD_FORMAT) or type(found) is not int:
        raise CheckpointError(
            f"{path} must have format {FORMAT} or {OLD_FORMAT}, but has another one. Use the version of zeroamp that "
            "wrote it."
        )
    if ("tensors" in content) != (found == FORMAT):
        raise _damage(path, f"tensors: must be there from format {FORMAT} on, and not before")
    if found == OLD_FORMAT:
        with _naming_damage(checkpoint / METADATA):
            content["tensors"] = layouts_in(read_regular(checkpoint / METADATA, _MAX_BYTES))
    try:
        return Manifest(**content)
    except ValidationError as error:
        problems = [": ".join([".".join(map(str, e["loc"])), e["msg"]]).removeprefix(": ") for e in error.errors()]
        raise _damage(path, some_of(problems)) from error


def _whole_content(text: bytes) -> dict[str, Any]:
    """Return the values of a manifest, without the digest, which must be theirs."""
    content: dict[str, Any] = json.loads(text.decode(), object_pairs_hook=once_each)
    if content.pop(_DIGEST) != _digest(content):
        raise ValueError("its text does not match its own digest")
    return content


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
    with _naming_damage(path):
        found = record_file(path)
    if found != record:
        was = f"{record.num_bytes} bytes, sha256 {record.sha256}"
        raise _damage(path, f"{found.num_bytes} bytes, sha256 {found.sha256} instead of {was}")


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    """Raise DamagedCheckpointError for what is raised, except an error of the file system that may go away."""
    try:
        yield
    except MemoryError:
        raise
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise _damage(path, str(error)) from error
    except Exception as error:  # the file may have any content
        raise _damage(path, f"{type(error).__name__}: {error}") from error


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
