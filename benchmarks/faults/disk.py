"""Disks that are full or read-only, and files that are damaged."""

import ctypes
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.attempt import Attempt, Runs
from benchmarks.faults.processes import at_end
from zeroamp import latest_checkpoint

_CLONE_NEWNS, _MS_REC_PRIVATE = 0x20000, 0x44000
_LARGE = "64m"
DAMAGES = ("truncated", "bit-flipped", "missing")


class NotPossibleHereError(Exception):
    """This machine or user cannot make such a fault. The text has the reason."""


def have_own_mounts() -> None:
    """Move this process and its forks to a mount namespace of their own: its mounts end with them.

    Raises:
        NotPossibleHereError: this process is not allowed to.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) != 0:
        raise NotPossibleHereError(f"no mounts of one's own: {os.strerror(ctypes.get_errno())}")


@contextmanager
def _disk(path: Path, size: str) -> Iterator[None]:
    """Mount a tmpfs of a size."""
    path.mkdir()
    with at_end(lambda: subprocess.run(["umount", path], check=True, timeout=30)):
        _mount("-t", "tmpfs", "-o", f"size={size}", "zeroamp-faults", str(path))
        yield


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=30)


def full(runs: Runs) -> Attempt:
    """Save to a disk that is full at some save, and resume when there is space again."""
    job = runs.job(keep=None, save_every=1)
    attempt = runs.attempt("disk full", job)
    num_bytes = int(_checkpoint_bytes(runs, attempt) * runs.random.uniform(0.1, job.num_steps - 1))
    with _disk(attempt.place.folder, str(num_bytes)):
        attempt.expect_refusal(attempt.run(), "No space left on device", str(attempt.place.folder))
        _mount("-o", f"remount,size={_LARGE}", str(attempt.place.folder))
        attempt.finish()
    return attempt


def full_for_a_while(runs: Runs) -> Attempt:
    """Save to a disk that is full at some save. The same process trains on, and saves again when there is space."""
    job = runs.job(keep=None, save_every=1, async_=False, goes_on=True)
    attempt = runs.attempt("disk full for a while", job)
    one = _checkpoint_bytes(runs, attempt)
    with _disk(attempt.place.folder, str(one * 20)):
        ballast = one * (20 - runs.random.uniform(0.1, job.num_steps - 1))
        (attempt.place.folder / "ballast").write_bytes(b"\0" * int(ballast))
        endings = attempt.run()
        attempt.lost(any(ending.of("refused") is None for ending in endings), "the disk was not full on all ranks")
        attempt.finish()
    return attempt


def _checkpoint_bytes(runs: Runs, attempt: Attempt) -> int:
    """Return the bytes that one checkpoint of the attempt's job takes on a disk."""
    place = runs.place()
    endings = place.start(replace(attempt.job, num_steps=1)).wait()
    attempt.lost(not all(ending.is_finished for ending in endings), "a step without a fault fails")
    page = resource.getpagesize()
    return sum(-(-file.stat().st_size // page) * page for file in place.folder.rglob("*") if file.is_file())


def file_too_large(runs: Runs) -> Attempt:
    """Let one of two ranks exceed a limit of file sizes: both must raise."""
    job = runs.job(num_ranks=2, save_every=1)  # with more ranks, files would be smaller than the limit
    attempt = runs.attempt("file size limit on one rank", job)
    victim = runs.random.randrange(job.num_ranks)
    limit = runs.random.randrange(_SMALLEST_LIMIT, _checkpoint_bytes(runs, attempt) // 4)

    def lower(rank: int) -> None:
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    attempt.run(num_steps=runs.random.randint(1, job.num_steps - 1))
    attempt.expect_refusal(attempt.run(before=lower), "File too large", str(attempt.place.folder))
    attempt.finish()
    return attempt


_SMALLEST_LIMIT = 4096
"""Smallest limit of a file in bytes: enough for a rank's report."""


def read_only(runs: Runs) -> Attempt:
    """Resume from a read-only folder: loading must work, and saving must raise."""
    job = runs.job()
    attempt = runs.attempt("read-only folder", job)
    folder = attempt.place.folder
    with _disk(folder, _LARGE):
        attempt.run(num_steps=runs.random.randint(1, job.num_steps - 1))
        _mount("-o", "remount,ro", str(folder))
        attempt.expect_refusal(attempt.run(), "Read-only file system", str(folder))
        _mount("-o", "remount,rw", str(folder))
        attempt.finish()
    return attempt


def damaged(runs: Runs) -> Attempt:
    """Damage a file of the newest checkpoint: the one before it must be loaded, and the log must name the file."""
    how = runs.random.choice(DAMAGES)
    job = runs.job(keep=runs.random.choice((None, 2)), save_every=1)
    attempt = runs.attempt("damaged file", job)
    attempt.run(num_steps=runs.random.randint(2, job.num_steps - 1))
    path = _damage_newest(how, runs, attempt)
    endings = attempt.run()
    is_named = str(path.parent) in endings[0].output and path.name in endings[0].output
    attempt.lost(not is_named, f"the log does not name {path}")
    attempt.finish()
    return attempt


def only_one_damaged(runs: Runs) -> Attempt:
    """Damage the only checkpoint: it must be refused by name, and loaded after it was repaired."""
    how = runs.random.choice(DAMAGES)
    job = runs.job(keep=1, save_every=1)
    attempt = runs.attempt("damaged file of the only checkpoint", job)
    attempt.run(num_steps=runs.random.randint(1, job.num_steps - 1))
    copy = attempt.place.reports / "copy"
    shutil.copytree(attempt.place.folder, copy)
    path = _damage_newest(how, runs, attempt)
    attempt.expect_refusal(attempt.run(), str(path))
    shutil.copytree(copy, attempt.place.folder, dirs_exist_ok=True)
    attempt.damaged.clear()
    attempt.finish()
    return attempt


def _damage_newest(how: str, runs: Runs, attempt: Attempt) -> Path:
    newest = latest_checkpoint(attempt.place.folder)
    if newest is None:
        raise AssertionError("expected a checkpoint, got none")
    path = runs.random.choice(sorted(newest.iterdir()))
    _damage(how, path, runs)
    attempt.damaged.add(newest.name)
    attempt.moments.append(f"{how} {path.name}")
    return path


def _damage(how: str, path: Path, runs: Runs) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: runs.random.randrange(len(content))])
    else:
        content[runs.random.randrange(len(content))] ^= 1 << runs.random.randrange(8)
        path.write_bytes(content)


def pointer(runs: Runs) -> Attempt:
    """Damage `latest` by each single bit and by each truncation: the newest checkpoint must still be found."""
    job = runs.job(keep=None, save_every=1, async_=False)
    attempt = runs.attempt("damaged pointer", job)
    attempt.run(num_steps=runs.random.choice((3, 5)))  # names that one bit turns into those of others
    folder, path = attempt.place.folder, attempt.place.folder / "latest"
    content, newest = path.read_bytes(), latest_checkpoint(folder)
    damages = [content[:length] for length in range(len(content))]
    damages += [_flipped(content, bit) for bit in range(8 * len(content))]
    logging.disable()  # many warnings are expected
    for damage in damages:
        path.write_bytes(damage)
        found = latest_checkpoint(folder)
        attempt.lost(found != newest, f"{damage!r} leads to {found}, not {newest}")
    logging.disable(logging.NOTSET)
    path.write_bytes(runs.random.choice(damages))
    attempt.finish()
    return attempt


def _flipped(content: bytes, bit: int) -> bytes:
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
