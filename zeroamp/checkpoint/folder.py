"""A folder of checkpoints: which are there, which is the newest, and the draft that becomes one by a single rename.

    FOLDER/
      latest                   the serial and the name of the newest checkpoint
      step_00000100/           a checkpoint: complete from the moment it has this name
      .draft-step_00000200-…/  one that is being written, or that a killed writer left

`latest` is written just before the rename. Where it names a checkpoint that exists, it is right, also after somebody
edited it to go back: what was published after that one then comes last. Where a writer was killed in between, the
checkpoint published last counts.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeroamp.checkpoint.locks import locked, try_lock, unlock
from zeroamp.checkpoint.manifest import MANIFEST, DamagedCheckpointError, Manifest, read_manifest
from zeroamp.policies.errors import CheckpointError

logger = logging.getLogger("zeroamp")

LATEST = "latest"
_PUBLISHED = re.compile(r"step_-?\d+(_\d+)?")
_WRITER = ".writer"
_DRAFT, _REMOVED = ".draft-", ".removed-"


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest published checkpoint of a folder, or None; only its manifest has been checked."""
    return next(iter(find_checkpoints(Path(folder))), None)


def find_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints of a folder, those to load first coming first.

    The pointed one and those published before it, newest first; those published after it; unreadable ones.
    """
    serials = {path: _serial(path) for path in root.iterdir() if _is_published(path)} if root.is_dir() else {}
    for path in (path for path, serial in serials.items() if serial == 0):
        logger.warning("%s cannot be told to be newer than others: its %s is damaged", path, MANIFEST)
    newest = _pointed(root, serials) or max(serials.values(), default=0)
    return sorted(serials, key=lambda path: (0 < serials[path] <= newest, serials[path], path.name), reverse=True)


def _pointed(root: Path, serials: dict[Path, int]) -> int | None:
    """Return the serial of the checkpoint that `latest` names, if it does; else the serials decide.

    A writer puts the serial before the name, as one damaged bit of a name can make the name of another checkpoint.
    Somebody who edits the file may leave the serial out.
    """
    try:
        *serial, name = (root / LATEST).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    found = serials.get(root / name, 0)
    if found > 0 and serial not in ([], [str(found)]):
        logger.warning("%s is ignored: %s has another serial than %s", root / LATEST, name, " ".join(serial))
        return None
    return found or None


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint rather than a folder of some, by its name or its manifest."""
    return _is_published(path) or (path / MANIFEST).exists()


def _is_published(path: Path) -> bool:
    return _PUBLISHED.fullmatch(path.name) is not None and path.is_dir()


def _serial(path: Path) -> int:
    try:
        return read_manifest(path).serial
    except DamagedCheckpointError:
        return 0
    except CheckpointError:  # of a newer format: newer than all
        return 2**63


@dataclass(slots=True)
class Draft:
    """A checkpoint that is being written. Its first rank holds it; the others know the path."""

    root: Path
    path: Path
    step: int
    _lock: int

    def publish(self, manifest: Callable[[int], Manifest], keep: int | None) -> Path:
        """Make the draft a checkpoint; then remove those of the same run beyond the newest `keep`.

        `manifest` gets the serial. All files of the draft are on the disk already.
        """
        with locked(self.root):
            published = {path: _serial(path) for path in self.root.iterdir() if _is_published(path)}
            complete = manifest(max(published.values(), default=0) + 1)
            write_durably(self.path / MANIFEST, complete.to_json().encode())
            (self.path / _WRITER).unlink()
            sync_folder(self.path)
            target = _free_name(self.root, self.step)
            _replace_durably(self.root / LATEST, f"{complete.serial} {target.name}".encode())
            self.path.rename(target)
            try:
                sync_folder(self.root)
            except OSError:  # it counts as failed, so it must not be found
                target.rename(self.path)
                raise
            self._unlock()
            if keep is not None:
                _prune(self.root, complete.run, keep)
        return target

    def discard(self) -> None:
        """Remove what was written."""
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock >= 0:
            unlock(self._lock)
            self._lock = -1


def open_draft(root: Path, step: int) -> Draft:
    """Make an empty draft, and remove what killed writers left. On one rank only."""
    root.mkdir(parents=True, exist_ok=True)
    with locked(root) as has_locks:
        if has_locks:
            _remove_leftovers(root)
        path = root / f"{_DRAFT}{_name(step)}-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        try:
            lock = os.open(path / _WRITER, os.O_CREAT | os.O_RDWR)
        except OSError:
            path.rmdir()
            raise
        try_lock(lock)
    return Draft(root, path, step, lock)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file; when this returns, its content is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_durably(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        write_durably(beside, content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _free_name(root: Path, step: int) -> Path:
    """Return where to publish: a step that is there already, of an earlier attempt, stays as it is."""
    path, attempt = root / _name(step), 1
    while path.exists():
        attempt += 1
        path = root / f"{_name(step)}_{attempt}"
    return path


def _prune(root: Path, run: str, keep: int) -> None:
    serials: dict[Path, int] = {}
    for path in filter(_is_published, root.iterdir()):
        with suppress(CheckpointError):  # what cannot be read is not ours to remove
            manifest = read_manifest(path)
            if manifest.run == run:
                serials[path] = manifest.serial
    for path in sorted(serials, key=lambda path: serials[path])[:-keep]:
        removed = path.with_name(f"{_REMOVED}{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            path.rename(removed)  # first, so that a kill during the removal leaves no half checkpoint
        except OSError as error:  # no reason to call the save a failure
            logger.warning("%s is not removed, though beyond the newest %d: %s", path, keep, error)
        else:
            shutil.rmtree(removed, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        is_abandoned = path.name.startswith(_DRAFT) and not _has_writer(path)
        if is_abandoned or path.name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(f".{LATEST}-"):
            path.unlink(missing_ok=True)


def _has_writer(draft: Path) -> bool:
    """Return whether the process that opened the draft lives: its lock ends with it."""
    try:
        descriptor = os.open(draft / _WRITER, os.O_RDWR)
    except FileNotFoundError:  # killed just before the rename, or just after the folder was made
        return False
    try:
        return try_lock(descriptor) is not True
    finally:
        unlock(descriptor)
