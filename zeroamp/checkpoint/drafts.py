"""Drafts (folders that are written under another name and then renamed), and durable writes.

The writer of a draft locks a file beside it. The lock ends with the process, so the next writer can distinguish drafts
of killed processes from drafts in progress. The file is not in the draft, so no published folder has one.
"""

import fcntl
import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path

from zeroamp.weights.replacement import sync_to_disk

logger = logging.getLogger("zeroamp")

WRITER = ".writer"
"""The end of a lock file's name. Earlier versions gave this name to a file inside of the draft."""


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


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist. When this returns, its entry is on the disk."""
    path.mkdir(parents=True, exist_ok=True)
    sync_to_disk(path.parent)


def make_draft(path: Path) -> int:
    """Create an empty draft. Return the file descriptor of its lock, for `unlock`.

    Raises:
        FileExistsError: there is such a draft.
    """
    path.mkdir()
    try:
        lock = os.open(lock_file(path), os.O_CREAT | os.O_RDWR)
    except BaseException:
        path.rmdir()
        raise
    _try_lock(lock)
    return lock


def lock_file(draft: Path) -> Path:
    """Return the path of a draft's lock file."""
    return draft.with_name(f"{draft.name}{WRITER}")


def has_writer(draft: Path) -> bool | None:
    """Return whether the process that writes a draft is alive, or None if the draft has no lock file."""
    for lock in (lock_file(draft), draft / WRITER):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            return not _try_lock(descriptor)
        finally:
            unlock(descriptor)
    return None


def remove_lock_file(draft: Path) -> None:
    """Remove a draft's lock file. Log a warning if that fails: nothing depends on it."""
    try:
        lock_file(draft).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is not needed any more, but cannot be removed: %s", lock_file(draft), error)


def _try_lock(descriptor: int) -> bool:
    """Try to lock a file. Return whether this call got the lock: False also on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release a lock, and close its file. Closing alone would leave it locked by forked processes (data loaders)."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with suppress(OSError):  # a network file system may raise; nothing was written
        os.close(descriptor)
