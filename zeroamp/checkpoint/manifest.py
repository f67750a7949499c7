"""The files of one checkpoint: their names, and the manifest with their digests.

zeroamp.json          the manifest: step, run, config and mesh of the checkpoint; size and SHA-256 of every other file
.metadata, *.distcp   written by torch.distributed.checkpoint: the tensors, in shards
train.pt              values that are the same on all ranks
rank_00000.pt         values of one rank: random state, `extra`, tensors that differ between ranks
weights.json          names of the weights for an export without the model; for a transformers model also config.json
"""

import errno
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.policies.numbers import is_integer
from zeroamp.weights.files import MANIFEST
from zeroamp.weights.untrusted_files import is_file_name, leads_out, open_regular, read_json

METADATA = ".metadata"
"""Written by torch: where the shards of each tensor are."""
VALUES = "train.pt"
"""Step counts, and one scheduler and one description per optimizer, the same on all ranks."""
FORMAT = 1
_DIGEST = "sha256"
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)
"""Of a file that is missing, not regular or too large. Others (EIO, ESTALE, EACCES) may be gone at the next read."""
_OF_RANK = re.compile(r"rank_(\d+)\.pt|__(\d+)_\d+\.distcp")


def rank_file(rank: int) -> str:
    """Return the name of the file that holds one rank's own values."""
    return f"rank_{rank:05d}.pt"


def checking_rank(name: str, index: int, num_ranks: int) -> int:
    """Return the rank that checks the digest of a file in a load.

    If as many ranks load as saved, this is the rank that reads the file next, so that its host has the file cached.

    Args:
        name: the file's name.
        index: the file's index among the checkpoint's files.
        num_ranks: number of ranks that load.
    """
    of_rank = _OF_RANK.fullmatch(name)
    return (int(of_rank[1] or of_rank[2]) if of_rank else index) % num_ranks


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cut short or changed. An earlier checkpoint may be whole."""


class UnreadableCheckpointError(CheckpointError):
    """A file of a checkpoint could not be read this time. The checkpoint may be whole."""


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
    serial: int
    """Number of the checkpoint in its folder, from 1 on, in the order of publication."""
    parent: int
    """The serial of the checkpoint that was saved or loaded before this one was saved; 0 if there was none."""
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
        UnreadableCheckpointError: the manifest could not be read this time.
        CheckpointError: the manifest has another format.
    """
    try:
        return _manifest_adapter().validate_json(json.dumps(_read_content(checkpoint)))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise DamagedCheckpointError(_damage(checkpoint / MANIFEST, some_of(problems))) from error


def read_serials(checkpoint: Path) -> tuple[int, int]:
    """Return `serial` and `parent` of a manifest, faster than `read_manifest`. Checks the manifest's own digest.

    Raises:
        CheckpointError: as `read_manifest`.
    """
    content = _read_content(checkpoint)
    serial, parent = content.get("serial"), content.get("parent")
    if not (is_integer(serial, at_least=0) and is_integer(parent, at_least=0)):
        raise DamagedCheckpointError(_damage(checkpoint / MANIFEST, "serial and parent must be integers >= 0"))
    return serial, parent


def _read_content(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        content: dict[str, Any] = read_json(path)
        is_whole = content.pop(_DIGEST) == _digest(content)
    except OSError as error:
        raise _unread(path, error) from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(_damage(path, f"{type(error).__name__}: {error}")) from error
    if not is_whole:
        raise DamagedCheckpointError(_damage(path, "its text does not match its own digest"))
    if content.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{path} must have format {FORMAT}, but has another one. Use the version of zeroamp that wrote it."
        )
    return content


@cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def record_file(path: Path) -> FileRecord:
    """Return size and digest of a file, for the manifest."""
    with open_regular(path) as file:
        return FileRecord(num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def record_content(content: bytes) -> FileRecord:
    """Return size and digest of a file with this content, for the manifest."""
    return FileRecord(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def refuse_other_size(path: Path, record: FileRecord) -> None:
    """Raise CheckpointError if a file does not have the size that was just written into it."""
    num_bytes = path.stat().st_size
    if num_bytes != record.num_bytes:
        raise CheckpointError(
            f"{path} has {num_bytes} bytes, but {record.num_bytes} were written into it. Another process changes files "
            "in the folder, or the file system loses writes. Save into another folder."
        )


def check_file(path: Path, record: FileRecord) -> None:
    """Raise DamagedCheckpointError unless the file has the recorded size and digest, and is inside the checkpoint.

    Raise UnreadableCheckpointError if the file could not be read this time.
    """
    if leads_out(path):
        raise DamagedCheckpointError(_damage(path, "a link that leads out of the checkpoint"))
    try:
        num_bytes = path.stat().st_size
        found = record_file(path) if num_bytes == record.num_bytes else None
    except OSError as error:
        raise _unread(path, error) from error
    if found is None:
        raise DamagedCheckpointError(_damage(path, f"{num_bytes} bytes instead of {record.num_bytes}"))
    if found != record:
        raise DamagedCheckpointError(_damage(path, f"sha256 {found.sha256} instead of {record.sha256}"))


def _unread(path: Path, error: OSError) -> CheckpointError:
    text = f"{type(error).__name__}: {error}"
    if error.errno in _DAMAGE:
        return DamagedCheckpointError(_damage(path, text))
    return UnreadableCheckpointError(
        f"{path} could not be read ({text}). The checkpoint may be whole: try again. If that "
        f"fails too, move {path.parent} away."
    )


def _damage(path: Path, found: str) -> str:
    return f"{path} is damaged: {found}. Load another checkpoint, or copy the file again."
