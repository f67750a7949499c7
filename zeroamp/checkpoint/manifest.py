"""The files of one checkpoint: their names, and the manifest with their digests.

zeroamp.json          the manifest: step, run, config and mesh of the checkpoint; size and SHA-256 of every other file
.metadata, *.distcp   written by torch.distributed.checkpoint: the tensors, in shards
train.pt              values that are the same on all ranks
rank_00000.pt         values of one rank: random state, `extra`, and its tensors that are not sharded
"""

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.weights.files import MANIFEST
from zeroamp.weights.untrusted_files import is_file_name, leads_out, open_regular, read_json

METADATA = ".metadata"
"""Written by torch: where the shards of each tensor are."""
VALUES = "train.pt"
"""Step counts, and one scheduler and one description per optimizer, the same on all ranks."""
FORMAT = 2
_DIGEST = "sha256"
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)
"""Of a file that is missing, not regular or too large. Others (EIO, ESTALE, EACCES) may be gone at the next read."""


def rank_file(rank: int) -> str:
    """Return the name of the file that holds one rank's own values."""
    return f"rank_{rank:05d}.pt"


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cut short or changed. An earlier checkpoint may be whole."""


def _file_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError("must be the name of a file in the checkpoint's own folder")
    return name


FileName = Annotated[str, AfterValidator(_file_name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and digest of one file of a checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of `zeroamp.json`: step, run, config and mesh of a checkpoint, and the record of each of its files."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    step: int
    """The number of the step, as the caller gave it."""
    run: str
    """Name of the training run, over all its restarts."""
    world_size: int
    mesh: tuple[int, ...]
    config: dict[str, Any]
    """The policy, as a config that `policy_from_config` reads."""
    versions: dict[str, str]
    """Versions of torch and zeroamp."""
    files: Mapping[FileName, FileRecord]

    def to_json(self) -> str:
        """Return the text of the file, which ends with a digest of the rest."""
        content = {"format": FORMAT, **asdict(self), "mesh": list(self.mesh)}
        return json.dumps({**content, _DIGEST: _digest(content)}, indent=1)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: the manifest is missing or damaged.
        CheckpointError: the manifest has another format.
        OSError: the manifest could not be read this time.
    """
    path = checkpoint / MANIFEST
    try:
        content: dict[str, Any] = read_json(path)
        is_whole = content.pop(_DIGEST) == _digest(content)
    except OSError as error:
        _refuse_damage(path, error)
        raise
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(_damage(path, f"{type(error).__name__}: {error}")) from error
    if not is_whole:
        raise DamagedCheckpointError(_damage(path, "its text does not match its own digest"))
    if content.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{path} must have format {FORMAT}, but has another one. Use the version of zeroamp that wrote it."
        )
    try:
        return _manifest_adapter().validate_json(json.dumps(content))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise DamagedCheckpointError(_damage(path, some_of(problems))) from error


@cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


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
        raise DamagedCheckpointError(_damage(path, "a link that leads out of the checkpoint"))
    try:
        found = record_file(path)
    except OSError as error:
        _refuse_damage(path, error)
        raise
    if found != record:
        was = f"{record.num_bytes} bytes, sha256 {record.sha256}"
        raise DamagedCheckpointError(_damage(path, f"{found.num_bytes} bytes, sha256 {found.sha256} instead of {was}"))


def _refuse_damage(path: Path, error: OSError) -> None:
    if error.errno in _DAMAGE:
        raise DamagedCheckpointError(_damage(path, str(error))) from error


def _damage(path: Path, found: str) -> str:
    return f"{path} is damaged: {found}. Load another checkpoint, or copy the file again."
