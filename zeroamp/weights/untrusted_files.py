"""Reads untrusted files: only regular files of bounded size, with names that do not lead out of their folder."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading.

    Other kinds of files raise, because opening a FIFO waits for a writer, and opening a device may have side effects.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(path, "rb")  # the caller closes it


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `max_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes:,} bytes", os.fspath(path))
    return content


def is_file_name(name: object) -> bool:
    """Return whether `name` is a printable file name without folders, so that it cannot lead out of its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and name.isprintable()


def leads_out(path: Path, *folders: Path) -> bool:
    """Return whether symbolic links lead from `path` to a place outside of its folder and of `folders`."""
    return not any(path.resolve().is_relative_to(folder.resolve()) for folder in (path.parent, *folders))
