"""Output files: checks that they can be written, and appends to logs."""

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from zeroamp.policies.errors import ConfigError


def imported(module: str, *, where: str, extra: str) -> Any:
    """Import and return an optional module.

    Raises:
        ConfigError: it is not installed. The text names the extra to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where} needs the module {error.name!r}: pip install 'zeroamp[{extra}]'.") from error


def check_folder(folder: Path) -> None:
    """Check that a folder can be written: make and remove a temporary folder in it, or in its nearest existing parent.

    Raises:
        OSError: the folder cannot be written.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    with tempfile.TemporaryDirectory(dir=nearest):
        pass


def append_to(path: Path, where: str) -> TextIO:
    """Open a file for appending. If a crash cut its last line, that line is ended first, so that only it is lost.

    Raises:
        ConfigError: the file cannot be written. The text begins with `where`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = path.is_file() and not _ends_whole(path)
        file = path.open("a", encoding="utf-8", newline="")
        if is_cut:
            file.write("\n")
        return file
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be written ({error.strerror}). Name another file.") from error


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def check_file(path: Path, where: str) -> None:
    """Check that a file can be written, before computing its content.

    Raises:
        ConfigError: the file cannot be written. The text begins with `where`.
    """
    with errors_of(path, where):
        check_folder(path.parent)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(None, "the file exists and is read-only")


@contextmanager
def errors_of(path: Path, where: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError that begins with `where` and names the file."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{where}: '{path}' cannot be written ({why}). Name a file in another folder.") from error
