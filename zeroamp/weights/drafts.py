"""Drafts (folders that are written under another name and then renamed or moved), and durable writes.

The writer of a draft locks a file beside it, which exists before the draft does. The lock ends with the process, so the
next writer can distinguish drafts of killed processes from drafts in progress.
"""

import fcntl
import logging
import os
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

logger = logging.getLogger("zeroamp")

_WRITER = ".writer"
"""The end of a lock file's name."""

_ATTEMPTS = 10
"""How often a lock is tried. `remove_leftovers` of another job holds it for an instant, unless it removes a draft."""

_SECONDS_BETWEEN_ATTEMPTS = 0.02


def sync_to_disk(path: Path) -> None:
    """Write the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file. When this returns, its content is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes, folder: Path) -> None:
    """Replace a file by one rename of a new one, written in `folder`. When this returns, the content is on the disk.

    `folder` must be on the same file system, and belong to the caller: in the file's own folder, another job's
    `remove_leftovers` may take the new file for that of a killed process.
    """
    new = folder / path.name
    try:
        write_durably(new, content)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync_to_disk(path.parent)


@dataclass(slots=True)
class Draft:
    """A folder that this process writes."""

    path: Path
    _lock: int
    """The file descriptor of the lock."""

    @classmethod
    def make(cls, path: Path) -> Self:
        """Create an empty draft.

        Raises:
            FileExistsError: there is such a draft.
        """
        draft = cls(path, _lock(path))
        try:
            path.mkdir()
        except FileExistsError:
            _unlock(draft._lock)
            raise
        except BaseException:
            draft.discard()
            raise
        return draft

    def release(self) -> None:
        """Release the lock, after the folder was renamed."""
        _remove_lock_file(self.path)
        _unlock(self._lock)

    def discard(self) -> None:
        """Remove the draft and all files in it."""
        try:
            with suppress(OSError):  # raised in spite of `ignore_errors` if a folder cannot be closed
                shutil.rmtree(self.path, ignore_errors=True)
            if os.path.lexists(self.path):
                logger.warning("%s is a draft, but cannot be removed. The next save or export tries again.", self.path)
            else:
                _remove_lock_file(self.path)
        finally:
            _unlock(self._lock)


def remove_leftovers(folder: Path, prefix: str, removed_prefix: str | None = None) -> None:
    """Remove the drafts of killed writers, whose names begin with `prefix`, and what killed removals left.

    `removed_prefix`: the beginning of the names of folders that were renamed to be removed; None if there are none.
    What cannot be removed stays, with a warning: the caller does not need its place.
    """
    for path in list(folder.iterdir()):
        try:
            if path.name.startswith(prefix):
                _remove_if_left(path.with_name(path.name.removesuffix(_WRITER)))
            elif removed_prefix is not None and path.name.startswith(removed_prefix) and path.is_dir():
                shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s may be left of a killed writer, but cannot be checked or removed: %s", path, error)


def _remove_if_left(draft: Path) -> None:
    """Remove a draft whose process has ended, and its lock file. Neither is removed if that is not known."""
    lock_file = _lock_file(draft)
    try:
        descriptor = os.open(lock_file, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        if _try_lock(descriptor) and _is_open_as(descriptor, lock_file):
            if draft.is_dir():
                shutil.rmtree(draft)
            lock_file.unlink()
    finally:
        _unlock(descriptor)


def _lock(draft: Path) -> int:
    """Create the lock file of a draft, and lock it. Return its descriptor.

    Raises:
        FileExistsError: another process has locked it.
    """
    for attempt in range(_ATTEMPTS):
        if attempt > 0:
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        descriptor = os.open(_lock_file(draft), os.O_CREAT | os.O_RDWR)
        with ExitStack() as stack:
            stack.callback(_unlock, descriptor)
            locked = _try_lock(descriptor)
            # Another job may have removed the file after it was opened here. Its lock would then protect nothing.
            if locked is None or (locked and _is_open_as(descriptor, _lock_file(draft))):
                stack.pop_all()
                return descriptor
    raise FileExistsError(f"another process writes {draft}")


def _is_open_as(descriptor: int, path: Path) -> bool:
    """Return whether the file that is open is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock_file(draft: Path) -> Path:
    return draft.with_name(f"{draft.name}{_WRITER}")


def _remove_lock_file(draft: Path) -> None:
    """Remove a draft's lock file. Log a warning if that fails: nothing depends on it."""
    try:
        _lock_file(draft).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is not needed any more, but cannot be removed: %s", _lock_file(draft), error)


def _try_lock(descriptor: int) -> bool | None:
    """Try to lock a file. False: another process has locked it. None: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(descriptor: int) -> None:
    """Release a lock, and close its file. Closing alone would leave it locked by forked processes (data loaders)."""
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        with suppress(OSError):  # a network file system may raise; nothing was written
            os.close(descriptor)
