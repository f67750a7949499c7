"""The manifest of a checkpoint: the one file that says what belongs to it, and by which every bit of it is checked."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.weights.files import MANIFEST

FORMAT = 1
_DIGEST = "sha256"


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not whole: a file of it is missing, cut short or changed. Another one may be."""


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("expected the name of a file in the checkpoint's own folder")
    return name


FileName = Annotated[str, AfterValidator(_file_name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What a file of a checkpoint must be."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint is, as `zeroamp.json` holds it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    step: int
    """The caller's number of the step."""
    serial: int
    """Counts the checkpoints of a folder in the order of their publication, from 1 on, whatever their steps."""
    parent: int
    """The serial of the checkpoint that this one's training had saved or loaded before it; 0: of none."""
    run: str
    """Names the training run, over all its restarts."""
    world_size: int
    mesh: tuple[int, ...]
    config: dict[str, Any]
    """The policy, as a config that `policy_from_config` reads."""
    versions: dict[str, str]
    """Of torch and zeroamp."""
    files: Mapping[FileName, FileRecord]

    def to_json(self) -> str:
        """Return the text of the file; it ends with a digest of all the rest."""
        content = {"format": FORMAT, **asdict(self), "mesh": list(self.mesh)}
        return json.dumps({**content, _DIGEST: _digest(content)}, indent=1)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: there is none that is whole.
        CheckpointError: it is of a newer format.
    """
    path = checkpoint / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop(_DIGEST)
        is_whole = found == _digest(content)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(_damage(path, f"{type(error).__name__}: {error}")) from error
    if not is_whole:
        raise DamagedCheckpointError(_damage(path, "a text that its own digest does not fit"))
    if content.pop("format", None) != FORMAT:
        raise CheckpointError(
            describe(str(path), "another format", f"format {FORMAT}", "Use the zeroamp that wrote it.")
        )
    try:
        return TypeAdapter(Manifest).validate_json(json.dumps(content))
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise DamagedCheckpointError(_damage(path, "; ".join(problems))) from error


def record_file(path: Path) -> FileRecord:
    """Return what the manifest keeps of a file."""
    with path.open("rb") as file:
        return FileRecord(num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def check_file(path: Path, record: FileRecord) -> None:
    """Raise DamagedCheckpointError unless the file is the recorded one, bit for bit."""
    try:
        num_bytes = path.stat().st_size
        found = record_file(path) if num_bytes == record.num_bytes else None
    except OSError as error:
        raise DamagedCheckpointError(_damage(path, f"{type(error).__name__}: {error}")) from error
    if found is None:
        raise DamagedCheckpointError(_damage(path, f"{num_bytes} bytes instead of {record.num_bytes}"))
    if found != record:
        raise DamagedCheckpointError(_damage(path, f"sha256 {found.sha256} instead of {record.sha256}"))


def _damage(path: Path, found: str) -> str:
    return describe(str(path), found, "the file as it was written", "Load another checkpoint, or copy the file again.")
