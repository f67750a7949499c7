"""Pictures in files. matplotlib is optional, and imported where one is asked for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeroamp.policies.errors import ConfigError, describe
from zeroamp.reporting.writers import check_folder, imported


def check_picture(path: Path) -> None:
    """Check that a picture can be written, before the work that it will show.

    Raises:
        ConfigError: there is no matplotlib, the suffix names no format, or the folder cannot be written.
    """
    suffix = path.suffix.lower().removeprefix(".")
    formats = sorted(_figure().canvas.get_supported_filetypes())
    if suffix not in formats:
        found = f"{str(path)!r}, whose suffix names no format"
        raise ConfigError(describe("plot", found, f"a file that ends in .{', .'.join(formats)}", "Change the suffix."))
    with _errors_of(path):
        check_folder(path.parent)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(None, "the file that is there cannot be written")


def new_figure(path: Path, *, width: float, height: float) -> Any:
    """Return a matplotlib figure for a file; sizes in inches. Raises as `check_picture` does."""
    check_picture(path)
    return _figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a figure; the folder is made.

    Raises:
        ConfigError: it cannot be written.
    """
    with _errors_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)


def _figure(**options: Any) -> Any:
    return imported("matplotlib.figure", where="plot", extra="plot").Figure(**options)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = f"{str(path)!r}, which cannot be written ({error.strerror or error})"
        raise ConfigError(describe("plot", found, "a file in a folder that can be written", "Change it.")) from error
