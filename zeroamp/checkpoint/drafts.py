"""Drafts (folders that are written under another name and then renamed), and durable writes.

The writer of a draft locks a file in it. The lock ends with the writer's process, so the next writer can distinguish
drafts of killed processes from drafts in progress.
"""

import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path

WRITER = ".writer"


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


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist. When this returns, its entry is on the disk."""
    path.mkdir(parents=True, exist_ok=True)
    sync_to_disk(path.parent)


def make_draft(path: Path) -> int:
    """Create an empty draft. Return the file descriptor of its lock, for `unlock`."""
    path.mkdir()
    try:
        lock = os.open(path / WRITER, os.O_CREAT | os.O_RDWR)
    except OSError:
        path.rmdir()
        raise
    _try_lock(lock)
    return lock


def has_writer(draft: Path) -> bool | None:
    """Return whether the process that writes a draft is alive, or None if the draft has no lock file."""
    try:
        descriptor = os.open(draft / WRITER, os.O_RDWR)
    except FileNotFoundError:  # killed just before the rename, or just after the folder was created
        return None
    try:
        return not _try_lock(descriptor)
    finally:
        unlock(descriptor)


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
