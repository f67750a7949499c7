"""Reads untrusted files: only regular files of bounded size."""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from zeroamp.policies.errors import ConfigError

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
        return json.loads(read_regular(path, MAX_JSON_BYTES).decode(), object_pairs_hook=_once_each)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a config file.

    Raises:
        ConfigError: the file cannot be read, or does not contain a JSON object.
    """
    try:
        loaded = read_json(path)
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read ({error}). Check the path of the file.") from error
    except ValueError as error:  # not JSON, not UTF-8, a number of thousands of digits, or nested too deeply
        raise ConfigError(f"config {str(path)!r} must contain a JSON object: {error}. Correct the file.") from error
    if not isinstance(loaded, dict):
        found = type(loaded).__name__
        raise ConfigError(f"config {str(path)!r} must contain a JSON object, but contains a {found}. Correct the file.")
    return loaded


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"the key {twice} occurs twice in one JSON object")
    return content
