"""Drafts (folders that are written under another name and then renamed or moved), and durable writes.

The writer of a draft locks a file beside it, which exists before the draft does. The lock ends with the process, so the
next writer can distinguish drafts of killed processes from drafts in progress.
"""

import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

logger = logging.getLogger("zeroamp")

_WRITER = ".writer"
"""The end of a lock file's name. Earlier versions gave this name to a file inside of the draft."""


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


def replace_durably(path: Path, content: bytes) -> None:
    """Replace a file by one rename. When this returns, the new content is on the disk."""
    beside = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        write_durably(beside, content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
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
        draft = cls(path, os.open(_lock_file(path), os.O_CREAT | os.O_RDWR))
        try:
            if _try_lock(draft._lock) is False:
                raise FileExistsError(f"another process writes {path}")
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
        _unlock(self._lock)
        _remove_lock_file(self.path)

    def discard(self) -> None:
        """Remove the draft and all files in it."""
        _unlock(self._lock)
        with suppress(OSError):  # raised in spite of `ignore_errors` if a folder cannot be closed
            shutil.rmtree(self.path, ignore_errors=True)
        if os.path.lexists(self.path):
            logger.warning("%s is a draft, but cannot be removed. The next save or export tries again.", self.path)
        else:
            _remove_lock_file(self.path)


def remove_leftovers(folder: Path, prefix: str, is_unused: Callable[[Path], bool] = lambda _: False) -> None:
    """Remove the drafts of killed writers, whose names begin with `prefix`, and paths for which `is_unused` is true.

    What cannot be removed stays, with a warning: the caller does not need its place.
    """
    for path in list(folder.iterdir()):
        try:
            if is_unused(path) or (path.name.startswith(prefix) and _is_left(path)):
                if path.is_dir():
                    shutil.rmtree(path)
                    _remove_lock_file(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s may be left of a killed writer, but cannot be checked or removed: %s", path, error)


def _is_left(path: Path) -> bool:
    """Return whether a path is the draft of a process that has ended, or its lock file without a draft."""
    if path.is_dir():
        return _has_no_writer(path)
    draft = path.with_name(path.name.removesuffix(_WRITER))
    return draft != path and not draft.exists() and _has_no_writer(draft)


def _has_no_writer(draft: Path) -> bool:
    """Return whether the process that wrote a draft has ended. False if that is not known."""
    for lock in (_lock_file(draft), draft / _WRITER):
        with suppress(FileNotFoundError):
            descriptor = os.open(lock, os.O_RDWR)
            try:
                return _try_lock(descriptor) is True
            finally:
                _unlock(descriptor)
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
