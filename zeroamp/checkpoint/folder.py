"""A folder of checkpoints: finds the newest, and publishes, removes and retains checkpoints.

    FOLDER/
      latest                 name of the newest checkpoint
      step_00000100/         a checkpoint: complete from the moment it has this name
      .draft-step_00000200/  a checkpoint that is being written, or that a killed writer left, beside its lock file

`latest` is written just after the rename. It may be edited to go back to an earlier checkpoint.
"""

import logging
import os
import re
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

from zeroamp.checkpoint.manifest import Manifest, read_manifest
from zeroamp.policies.errors import CheckpointError, error_text
from zeroamp.weights.drafts import Draft, remove_leftovers, replace_durably, sync_to_disk, write_durably
from zeroamp.weights.files import MANIFEST
from zeroamp.weights.untrusted_files import read_regular

logger = logging.getLogger("zeroamp")

LATEST = "latest"
_MAX_POINTER_BYTES = 4096
MAX_STEP = 10**20 - 1
_PUBLISHED = re.compile(r"step_(\d{1,20})(?:_(\d{1,18}))?")
_DRAFT, _REMOVED = ".draft-", ".removed-"


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest published checkpoint of a folder, or None. Does not check its files.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        return next(iter(find_checkpoints(Path(folder))), None)
    except OSError as error:
        raise CheckpointError(f"{os.fspath(folder)} cannot be read: {error}. Check the path.") from error


def find_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints of a folder, in the order in which to try to load them.

    First the one that `latest` names, then those of earlier steps, then those of later steps, each latest step first.
    """
    found = _places(root) if root.is_dir() else {}
    newest = _named_by_pointer(root, found) or max(found.values(), default=(0, 0))
    return sorted(found, key=lambda path: (found[path] <= newest, found[path]), reverse=True)


def _places(root: Path) -> dict[Path, tuple[int, int]]:
    """Return step and attempt of each checkpoint in a folder."""
    names = ((path, _PUBLISHED.fullmatch(path.name)) for path in root.iterdir() if path.is_dir())
    return {path: (int(match[1]), int(match[2] or 1)) for path, match in names if match is not None}


def _named_by_pointer(root: Path, found: dict[Path, tuple[int, int]]) -> tuple[int, int] | None:
    """Return the place of the checkpoint that `latest` names, or None if it names none."""
    try:
        name = read_regular(root / LATEST, _MAX_POINTER_BYTES).decode().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s is ignored: it cannot be read (%s).", root / LATEST, error)
        return None
    place = found.get(root / name)
    if place is None:
        logger.warning("%s is ignored: it names %r, which is not a checkpoint there.", root / LATEST, name)
    return place


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint, by its name or its manifest, and not a folder of checkpoints."""
    return (is_checkpoint_name(path.name) and path.is_dir()) or (path / MANIFEST).exists()


def is_checkpoint_name(name: str) -> bool:
    """Return whether `name` has the form of the names that `save_checkpoint` gives: step_00000100."""
    return _PUBLISHED.fullmatch(name) is not None


class CheckpointDraft(Draft):
    """A checkpoint that is being written. Only the first rank has this object."""

    @property
    def target(self) -> Path:
        """The checkpoint's path once it is published."""
        return self.path.with_name(self.path.name.removeprefix(_DRAFT))

    def publish(self, manifest: Manifest, keep: int | None) -> None:
        """Rename the draft to a checkpoint, let `latest` name it, and remove those of its run but the newest `keep`.

        All files of the draft but the manifest must already be on the disk. If an exception is raised, the checkpoint
        is a draft again, or the exception is a CheckpointError that states where the checkpoint is. A failure to remove
        others is a warning.
        """
        root, name = self.target.parent, self.target.name
        write_durably(self.path / MANIFEST, manifest.to_json().encode())
        sync_to_disk(self.path)
        before = _pointer(root)
        try:
            self.path.rename(self.target)
            sync_to_disk(root)
            replace_durably(root / LATEST, name.encode(), self.target)
        except BaseException as error:  # the save has failed, so no load may find the checkpoint
            self._take_back(before, error)
            raise
        self.release()
        if keep is not None:
            try:
                _prune(self.target, manifest.run, keep)
            except OSError as error:
                logger.warning("%s is saved, but checkpoints before it cannot be removed: %s", self.target, error)

    def _take_back(self, before: bytes | None, error: BaseException) -> None:
        """Make the checkpoint a draft again, after a failure to publish it."""
        try:
            if os.path.lexists(self.target):
                self.target.rename(self.path)
            if _pointer(self.target.parent) == self.target.name.encode():
                if before is None:
                    (self.target.parent / LATEST).unlink()
                else:
                    replace_durably(self.target.parent / LATEST, before, self.path)
        except OSError as second:
            if os.path.lexists(self.target):
                raise CheckpointError(
                    f"{LATEST} may name another checkpoint ({error_text(error)}; {error_text(second)}). Load "
                    f"{self.target} by its own path, or remove it."
                ) from error
            logger.warning("%s may name %s, which is not there: %s", LATEST, self.target.name, second)


def _pointer(root: Path) -> bytes | None:
    """Return the content of `latest`, or None if it cannot be read."""
    try:
        return read_regular(root / LATEST, _MAX_POINTER_BYTES)
    except OSError:
        return None


def open_draft(root: Path, step: int) -> CheckpointDraft:
    """Create an empty draft, and remove the drafts that killed writers left. Only the first rank calls this.

    Checkpoints are never overwritten: if the step exists, the new checkpoint is its second attempt.
    """
    root.mkdir(parents=True, exist_ok=True)
    sync_to_disk(root.parent)
    remove_leftovers(root, _DRAFT, _REMOVED)
    for attempt in count(1):
        target = root / (f"step_{step:08d}" if attempt == 1 else f"step_{step:08d}_{attempt}")
        if not os.path.lexists(target):
            with suppress(FileExistsError):  # another job writes it
                draft = CheckpointDraft.make(root / f"{_DRAFT}{target.name}")
                if not os.path.lexists(target):
                    return draft
                draft.discard()  # another job published it before the lock was free
    raise AssertionError("expected a free name")


def _prune(newest: Path, run: str, keep: int) -> None:
    """Remove checkpoints of a run up to the step of `newest`, which `latest` names, except the newest `keep`."""
    places = _places(newest.parent)
    of_run = [path for path, place in places.items() if place <= places[newest] and _run(path) == run]
    for path in sorted(of_run, key=places.__getitem__, reverse=True)[keep:]:
        removed = path.with_name(f"{_REMOVED}{path.name}")
        try:
            shutil.rmtree(removed, ignore_errors=True)  # of an earlier removal that failed
            path.rename(removed)  # first, so that a kill during the removal leaves no partial checkpoint under its name
            shutil.rmtree(removed)
        except OSError as error:  # the save itself has succeeded
            text = "%s is saved, but %s is not among the newest %d and cannot be removed: %s"
            logger.warning(text, newest, path, keep, error)


def _run(path: Path) -> str | None:
    """Return the run that saved a checkpoint, or None if its manifest cannot be read."""
    try:
        return read_manifest(path).run
    except (CheckpointError, OSError):
        return None
