"""A folder of checkpoints: finds the newest, publishes and removes drafts, and locks out other writers.

    FOLDER/
      latest                   serial, name and parent's serial of the newest checkpoint
      step_00000100/           a checkpoint: complete from the moment it has this name
      .draft-step_00000200-…/  a checkpoint that is being written, or that a killed writer left

`latest` is written just before the draft is renamed. If it names a checkpoint that exists, this checkpoint is the
newest. It may be edited to go back to an earlier checkpoint: those published after that one then come last. If a writer
was killed before the rename, the parent is the newest. If `latest` is damaged, it is the checkpoint published last.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zeroamp.checkpoint.manifest import DamagedCheckpointError, Manifest, UnreadableCheckpointError, read_serials
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights import drafts
from zeroamp.weights.drafts import (
    WRITER,
    has_writer,
    make_draft,
    make_folder,
    replace_durably,
    sync_to_disk,
    unlock,
    write_durably,
)
from zeroamp.weights.files import MANIFEST
from zeroamp.weights.untrusted_files import read_regular

logger = logging.getLogger("zeroamp")

LATEST = "latest"
_MAX_POINTER_BYTES = 4096
_PUBLISHED = re.compile(r"step_-?\d+(_\d+)?")
_DRAFT, _REMOVED = ".draft-", ".removed-"
LOCK = ".lock"


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest published checkpoint of a folder, or None. Checks manifests, but no other files."""
    return next(iter(find_checkpoints(Path(folder))), None)


def find_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints of a folder, in the order in which to try to load them.

    First the one that `latest` names and its ancestors, then others published before it, then those published after it,
    each newest first. Last those with a damaged manifest, and those whose manifest cannot be read and that `latest`
    does not name.
    """
    found = _places(root, unreadable=_place_in_pointer) if root.is_dir() else {}
    for path in (path for path, place in found.items() if place.serial == 0):
        text = "%s is damaged or cannot be read. This checkpoint is not loaded while the folder has another one."
        logger.warning(text, path / MANIFEST)
    newest = _pointed(root, found) or _last_serial(found)
    line = set(_line(newest, found))

    def order(path: Path) -> tuple[bool, bool, int, str]:
        serial = found[path].serial
        return path in line, 0 < serial <= newest, serial, path.name

    return sorted(found, key=order, reverse=True)


class _Place(NamedTuple):
    """Serial and parent's serial of a checkpoint; see `Manifest`."""

    serial: int
    parent: int


def _places(root: Path, unreadable: Callable[[Path], _Place] | None = None) -> dict[Path, _Place]:
    """Return the place of each checkpoint. For one that cannot be read, call `unreadable`, or raise for None."""
    return {path: _place(path, unreadable) for path in root.iterdir() if _is_published(path)}


def _place(path: Path, unreadable: Callable[[Path], _Place] | None) -> _Place:
    try:
        return _Place(*read_serials(path))
    except UnreadableCheckpointError:
        if unreadable is None:
            raise
        return unreadable(path)
    except DamagedCheckpointError:
        return _Place(0, 0)
    except CheckpointError:  # another format: taken as the newest
        return _Place(2**63, 0)


def _place_in_pointer(path: Path) -> _Place:
    """Return the serials that `latest` has for the checkpoint that it names, and zeros for others."""
    with suppress(OSError, ValueError):
        serial, name, parent = read_regular(path.with_name(LATEST), _MAX_POINTER_BYTES).decode().split()
        if name == path.name:
            return _Place(int(serial), int(parent))
    return _Place(0, 0)


def _last_serial(found: dict[Path, _Place]) -> int:
    return max((place.serial for place in found.values()), default=0)


def _line(serial: int, found: dict[Path, _Place]) -> list[Path]:
    """Return a checkpoint and those of its ancestors that exist, newest first."""
    by_serial = {place.serial: path for path, place in found.items() if place.serial > 0}
    line: list[Path] = []
    while serial in by_serial:  # each is removed, so that damaged parents cannot form a cycle
        line.append(by_serial.pop(serial))
        serial = found[line[-1]].parent
    return line


def _pointed(root: Path, found: dict[Path, _Place]) -> int | None:
    """Return the serial of the checkpoint that `latest` names, or None if it names none.

    A writer puts the serial before the name, because one flipped bit can turn a name into that of another checkpoint.
    The parent's serial comes after the name, and is used if the writer was killed before the rename. Both serials may
    be left out of an edited file.
    """
    try:
        words = read_regular(root / LATEST, _MAX_POINTER_BYTES).decode().split()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s is ignored: it cannot be read (%s).", root / LATEST, error)
        return None
    if len(words) in (1, 3):
        name, serials = words[len(words) // 2], {str(place.serial) for place in found.values()}
        there = found.get(root / name, _Place(0, 0)).serial
        if there > 0 and words[0] in (name, str(there)):
            return there
        if len(words) == 3 and there == 0 and words[0] not in serials and words[2] in serials:
            return int(words[2]) or None
    logger.warning("%s is ignored: it names %r, which is not a checkpoint there.", root / LATEST, " ".join(words))
    return None


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint, by its name or its manifest, and not a folder of checkpoints."""
    return _is_published(path) or (path / MANIFEST).exists()


def is_checkpoint_name(name: str) -> bool:
    """Return whether `name` has the form of the names that `save_checkpoint` gives: step_00000100."""
    return _PUBLISHED.fullmatch(name) is not None


def _is_published(path: Path) -> bool:
    return is_checkpoint_name(path.name) and path.is_dir()


@dataclass(slots=True)
class Draft:
    """A checkpoint that is being written. Only the first rank has this object."""

    root: Path
    path: Path
    step: int
    _lock: int

    def publish(self, manifest: Callable[[int], Manifest], keep: int | None) -> Path:
        """Rename the draft to a checkpoint, then remove its ancestors beyond the newest `keep`.

        `manifest` returns the manifest for a serial. All other files of the draft must already be on the disk.
        """
        with locked(self.root):
            places = _places(self.root)
            complete = manifest(_last_serial(places) + 1)
            write_durably(self.path / MANIFEST, complete.to_json().encode())
            (self.path / WRITER).unlink()
            sync_to_disk(self.path)
            target = _free_name(self.root, self.step)
            replace_durably(self.root / LATEST, f"{complete.serial} {target.name} {complete.parent}".encode())
            self.path.rename(target)
            try:
                sync_to_disk(self.root)
            except OSError:  # the save has failed, so no load may find the checkpoint
                target.rename(self.path)
                raise
            self._unlock()
            if keep is not None:
                places[target] = _Place(complete.serial, complete.parent)
                _prune(_line(complete.serial, places)[keep:], keep)
        return target

    def discard(self) -> None:
        """Remove the draft and all files in it."""
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock >= 0:
            unlock(self._lock)
            self._lock = -1


def open_draft(root: Path, step: int) -> Draft:
    """Create an empty draft, and remove the drafts that killed writers left. Only the first rank calls this."""
    make_folder(root)
    with locked(root) as has_locks:
        if has_locks:
            _remove_leftovers(root)
        path = root / f"{_DRAFT}{_name(step)}-{uuid.uuid4().hex[:8]}"
        lock = make_draft(path)
    return Draft(root, path, step, lock)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _free_name(root: Path, step: int) -> Path:
    """Return a name for the checkpoint of a step that does not exist yet: checkpoints are never overwritten."""
    path, attempt = root / _name(step), 1
    while os.path.lexists(path):
        attempt += 1
        path = root / f"{_name(step)}_{attempt}"
    return path


def _prune(paths: list[Path], keep: int) -> None:
    for path in paths:
        removed = path.with_name(f"{_REMOVED}{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            path.rename(removed)  # first, so that a kill during the removal leaves no partial checkpoint under its name
        except OSError as error:  # the save itself has succeeded
            logger.warning("%s is not among the newest %d, but cannot be removed: %s", path, keep, error)
        else:
            shutil.rmtree(removed, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """Remove the drafts of killed writers. Other files and folders stay, even if their names begin like those."""
    for path in root.iterdir():
        if path.name.startswith((_DRAFT, _REMOVED)) and path.is_dir():
            if path.name.startswith(_REMOVED) or not has_writer(path):
                shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(f".{LATEST}-"):
            with suppress(OSError):
                path.unlink()


def locked(root: Path) -> AbstractContextManager[bool]:
    """Lock a folder of checkpoints against other writers; see `drafts.locked`."""
    return drafts.locked(root / LOCK)
