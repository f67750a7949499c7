"""Drafts (folders that are written under another name and then renamed), durable writes, and locks.

The writer of a draft locks a file in it. The lock ends with the writer's process, so the next writer can distinguish
drafts of killed processes from drafts in progress.
"""

import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroamp.policies.errors import CheckpointError

WRITER = ".writer"
TIMEOUT_S = 60.0


def sync_to_disk(path: Path) -> None:
    """Write the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        _close(descriptor)


def _close(descriptor: int) -> None:
    """Close a file that was not written through `descriptor`. A network file system may raise: nothing is lost."""
    with suppress(OSError):
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
    """Create a folder and its parents, unless they exist. When this returns, all of them are on the disk."""
    for folder in reversed([folder for folder in path.parents if not folder.exists()]):
        folder.mkdir(exist_ok=True)
        sync_to_disk(folder.parent)
    if not path.is_dir():
        path.mkdir(exist_ok=True)  # another job may create the same folder now
        sync_to_disk(path.parent)


def make_draft(path: Path) -> int:
    """Create an empty draft. Return the file descriptor of its lock, for `unlock`."""
    path.mkdir()
    try:
        lock = os.open(path / WRITER, os.O_CREAT | os.O_RDWR)
    except OSError:
        path.rmdir()
        raise
    try_lock(lock)
    return lock


def has_writer(draft: Path) -> bool | None:
    """Return whether the process that writes a draft is alive, or None if the draft has no lock file."""
    try:
        descriptor = os.open(draft / WRITER, os.O_RDWR)
    except FileNotFoundError:  # killed just before the rename, or just after the folder was created
        return None
    try:
        return try_lock(descriptor) is not True
    finally:
        unlock(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Try to lock a file. Return whether the lock was free, or None if the file system has no locks.

    Without locks, drafts of killed writers are not removed, and two writers of one folder may run at once. That costs
    space and the order of checkpoints, but no checkpoint is lost, because all names are unique.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def unlock(descriptor: int) -> None:
    """Release a lock, and close its file. Closing alone would leave it locked by forked processes (data loaders)."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    _close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a folder, or a file, which is created if it does not exist. Yields whether the file system has locks.

    Writers hold this lock only for renames and removals, not while they write data.

    Raises:
        CheckpointError: another process has held the lock for more than a minute.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_RDWR)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while (is_free := try_lock(descriptor)) is False:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Another process has locked {path} for {TIMEOUT_S:.0f} s, but writers need this lock only for "
                    "moments. End that process, or save into another folder."
                )
            time.sleep(0.05)
        yield is_free is True
    finally:
        unlock(descriptor)
