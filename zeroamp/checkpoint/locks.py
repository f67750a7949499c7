"""Locks of the writers of one folder of checkpoints."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroamp.policies.errors import CheckpointError, describe

LOCK = ".lock"
TIMEOUT_S = 60.0


def try_lock(descriptor: int) -> bool | None:
    """Take the lock of a file, and return whether it was free; None where the file system has no locks.

    There no leftovers are removed, and two writers of one folder are not kept apart: that costs space and order, never
    a checkpoint, since all names are unique.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def unlock(descriptor: int) -> None:
    """Give a lock back. Closing alone would leave it with a process that was forked in between, a data loader's say."""
    with suppress(OSError):  # of a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextmanager
def locked(root: Path) -> Iterator[bool]:
    """Keep other writers out of a folder; yield whether the file system can.

    The lock is held for renames and removals only, never while data is written.

    Raises:
        CheckpointError: somebody holds it for longer than a minute.
    """
    descriptor = os.open(root / LOCK, os.O_CREAT | os.O_RDWR)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while (is_free := try_lock(descriptor)) is False:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    describe(
                        str(root / LOCK),
                        f"a lock that another process has held for {TIMEOUT_S:.0f} s",
                        "one that is held for moments",
                        "End the other process, or save into a folder of its own.",
                    )
                )
            time.sleep(0.05)
        yield is_free is True
    finally:
        unlock(descriptor)
