"""Reads untrusted files: only regular files of bounded size, with names that do not lead out of their folder."""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from zeroamp.policies.json_values import once_each

MAX_JSON_BYTES = 32 * 1024**2
"""32 MiB: three times the size of a safetensors index of 100,000 tensors."""


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


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file of at most `MAX_JSON_BYTES`.

    Raises:
        OSError: as `read_regular`.
        ValueError: the content is not JSON in UTF-8, is nested too deeply, or has a key twice in one object.
    """
    try:
        return json.loads(read_regular(path, MAX_JSON_BYTES).decode(), object_pairs_hook=once_each)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_file_name(name: object) -> bool:
    """Return whether `name` is a printable file name without folders, so that it cannot lead out of its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and name.isprintable()


def leads_out(path: Path, *folders: Path) -> bool:
    """Return whether symbolic links lead from `path` to a place outside of its folder and of `folders`."""
    return not any(path.resolve().is_relative_to(folder.resolve()) for folder in (path.parent, *folders))
