"""Variants of crafted files: how good files are changed, and which reader reads them."""

import os
import pickle
import socket
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch

MARK = "executed"
"""A file of this name appears in a variant's folder if code in a crafted file was run."""
BOMB_BYTES = 1024**3


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A crafted folder and its reader."""

    reader: str
    """Key of `readers.READERS`."""
    name: str
    craft: Callable[[Path], None]
    """Changes a copy of the reader's good folder."""
    ends: Literal["refused", "harmless"] = "refused"
    """"harmless": it is read with the values of the good files."""


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def harm(folder: Path) -> Call:
    """Return an object that creates the file `MARK` when it is unpickled."""
    return Call(os.system, f"touch {folder / MARK}")


@dataclass(frozen=True)
class Storage:
    """A storage in a file of torch.save."""

    num_elements: int
    kind: Any = torch.FloatStorage
    key: str = "0"


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Storage):
            return "storage", value.kind, value.key, "cpu", value.num_elements
        return None


def dumps(value: Any) -> bytes:
    """Return the pickle that torch.save would write."""
    file = BytesIO()
    _Pickler(file, 2).dump(value)
    return file.getvalue()


def tensor(storage: Storage, *shape: int, stride: tuple[int, ...] | None = None) -> Call:
    """Return an object that pickles as a tensor."""
    strides = stride or tuple(torch.empty(shape, device="meta").stride())
    return Call(torch._utils._rebuild_tensor_v2, storage, 0, shape, strides, False, OrderedDict())


def archive(
    value: Any,
    records: dict[str, bytes] | None = None,
    *,
    compressed: bool = False,
    more: dict[str, bytes] | None = None,
) -> bytes:
    """Return a file in the format of torch.save, with any pickle and any storages."""
    file = BytesIO()
    content = value if isinstance(value, bytes) else dumps(value)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as packed:
        packed.writestr("archive/data.pkl", content)
        packed.writestr("archive/byteorder", b"little")
        for key, data in (records or {}).items():
            packed.writestr(f"archive/data/{key}", data)
        packed.writestr("archive/version", b"3\n")
        for name, data in (more or {}).items():
            packed.writestr(name, data)
    return file.getvalue()


def saved(value: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def nested(depth: int) -> Any:
    """Return lists nested `depth` times."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def doubled(times: int) -> Any:
    """Return a value that takes few bytes in a pickle and 2**times in its repr."""
    value: Any = ["x" * 8]
    for _ in range(times):
        value = [value, value]
    return value


def put(name: str, content: bytes | str) -> Callable[[Path], None]:
    """Replace the file `name`."""

    def craft(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return craft


def special(name: str, kind: str) -> Callable[[Path], None]:
    """Replace the file `name` by a special file or by a link."""

    def craft(folder: Path) -> None:
        path = folder / name
        content = path.read_bytes() if path.exists() else b""
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            here = os.getcwd()
            os.chdir(path.parent)  # names of sockets are short
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
            os.chdir(here)
        elif kind == "folder":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "link out":
            outside = folder.parent / f"outside-{path.name}"
            outside.write_bytes(content)
            path.symlink_to(outside)
        elif kind == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif kind == "empty":
            path.touch()
        elif kind == "gone":
            pass

    return craft
