"""Files that instruments write: checked before the work, appended to, and pictures by matplotlib, which is optional."""

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from zeroamp.policies.errors import ConfigError


def imported(module: str, *, where: str, extra: str) -> Any:
    """Return an optional module.

    Raises:
        ConfigError: it is not installed; the text says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where} needs the module {error.name!r}: pip install zeroamp[{extra}].") from error


def check_folder(folder: Path) -> None:
    """Write into the folder, or into the nearest one above that is there, and leave nothing behind.

    Raises:
        OSError: as writing into the folder, which is made then, would.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    with tempfile.TemporaryDirectory(dir=nearest):
        pass


def append_to(path: Path, where: str) -> TextIO:
    """Open a file to append to. A line that a crash cut is ended first, so that only it is lost.

    Raises:
        ConfigError: it cannot be written. The text begins with `where`.
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


def check_picture(path: Path) -> None:
    """Check that a picture can be written, before the work that it shows.

    Raises:
        ConfigError: there is no matplotlib, the suffix names no format, or the folder cannot be written.
    """
    suffix = path.suffix.lower().removeprefix(".")
    formats = sorted(_figure().canvas.get_supported_filetypes())
    if suffix not in formats:
        raise ConfigError(f"plot: the suffix of '{path}' names no format. It must be one of .{', .'.join(formats)}.")
    check_file(path, "plot")


def check_file(path: Path, where: str) -> None:
    """Check that a file can be written, before the work that goes into it.

    Raises:
        ConfigError: it cannot. The text begins with `where`.
    """
    with errors_of(path, where):
        check_folder(path.parent)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(None, "the file exists and is read-only")


def new_figure(path: Path, *, width: float, height: float) -> Any:
    """Return a matplotlib figure for a file; sizes in inches. Raises as `check_picture` does."""
    check_picture(path)
    return _figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a figure; the folder is made.

    Raises:
        ConfigError: it cannot be written.
    """
    with errors_of(path, "plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)


def _figure(**options: Any) -> Any:
    return imported("matplotlib.figure", where="plot", extra="plot").Figure(**options)


@contextmanager
def errors_of(path: Path, where: str) -> Iterator[None]:
    """Raise an OSError inside as a ConfigError that begins with `where` and names the file."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{where}: '{path}' cannot be written ({why}). Name a file in another folder.") from error
