"""Reads untrusted files of `torch.save`: runs no code, and takes no more memory than the file has bytes.

`torch.load(weights_only=True)` runs no code, but does not check sizes: records may be compressed a thousandfold, and a
pickle may allocate a buffer of any length. So the archive's records are checked first. Then its pickle is read with
inert classes in place of all classes and functions that it names. Only then `torch.load` reads the file.
"""

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from typing import IO, Any

import torch

from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.untrusted_files import open_regular

_ELEMENT_BYTES = {
    "Bool": 1,
    "Byte": 1,
    "Char": 1,
    "QInt8": 1,
    "QUInt8": 1,
    "Untyped": 1,
    "BFloat16": 2,
    "Half": 2,
    "Short": 2,
    "Float": 4,
    "Int": 4,
    "QInt32": 4,
    "ComplexFloat": 8,
    "Double": 8,
    "Long": 8,
    "ComplexDouble": 16,
}
"""Storage class without its suffix "Storage" -> bytes per element."""


class Inert:
    """Replaces a class or function that a pickle names. Stores its arguments and state, and does nothing else."""

    name = ""
    """Module and name of the class or function that it replaces."""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> "Inert":
        """Store the arguments.

        Raises:
            ValueError: a call of the real class could allocate more memory than the file has bytes.
        """
        module, _, last = cls.name.rpartition(".")
        is_of_torch = module.partition(".")[0] == "torch" and last.endswith(("Tensor", "Storage"))
        if is_of_torch or (last == "bytearray" and any(isinstance(argument, int) for argument in args)):
            raise ValueError(f"its pickle calls {cls.name}")
        if last == "_rebuild_from_type_v2" and isinstance(args[0], type):  # torch's function calls its first argument
            args[0](*args[2])
        self = super().__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def _ignore(self, *_: Any) -> None:
        """Ignore an element that the pickle adds to this object as to a container."""

    __setitem__ = append = extend = add = _ignore


class InertUnpickler(pickle.Unpickler):
    """Unpickles with `Inert` in place of every class and function."""

    def __init__(self, content: bytes, persistent_load: Callable[[Any], Any] | None = None) -> None:
        """`persistent_load` is called with each persistent id.

        Raises:
            ValueError: `content` is not a pickle, or would allocate more memory than it has bytes.
        """
        for opcode, argument, _ in pickletools.genops(content):  # also refuses lengths beyond the end
            if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(content):
                raise ValueError(f"its pickle of {len(content)} bytes has {argument:,} objects to remember")
        super().__init__(io.BytesIO(content))
        self._persistent_load = persistent_load
        self._found: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an `Inert` class that only this unpickler uses, because a pickle may change its classes."""
        full = f"{module}.{name}"
        if full not in self._found:
            self._found[full] = type(name, (Inert,), {"name": full})
        return self._found[full]

    def persistent_load(self, pid: Any) -> Any:
        """Pass the id of a tensor's storage to the function given at construction."""
        if self._persistent_load is None:
            raise pickle.UnpicklingError("its pickle has a persistent id")
        return self._persistent_load(pid)


def load_archive(file: str | os.PathLike[str] | IO[bytes], where: str, *, mmap: bool = False) -> Any:
    """Return the content of a file of `torch.save`: tensors on the CPU, and plain values.

    Args:
        file: a path, or an open file.
        where: the name of the file in errors.
        mmap: if `file` is a path, map the tensors from the file instead of reading them.

    Raises:
        CheckpointError: `torch.save` did not write the file, or to read it could run code or take more memory than the
            file has bytes.
    """
    try:
        if isinstance(file, str | os.PathLike):
            with open_regular(file) as opened:
                _inspect(opened)
                return torch.load(file if mmap else opened, map_location="cpu", weights_only=True, mmap=mmap)
        _inspect(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's text explains how to switch the check off
        raise CheckpointError(f"{where} is not read: {_refused(unsafe_names(file))}") from error
    except Exception as error:  # a hostile or damaged file may make the readers raise anything
        raise CheckpointError(
            f"{where} cannot be read as a file of torch.save ({type(error).__name__}: {error}). Copy it again, or load "
            "another checkpoint."
        ) from error


def unsafe_names(file: str | os.PathLike[str] | IO[bytes]) -> list[str]:
    """Return the classes and functions that a file's pickle names, except those of tensors; [] if it is unreadable."""
    try:
        if isinstance(file, str | os.PathLike):
            with open_regular(file) as opened:
                _inspect(opened)  # first, because torch's scan decompresses the whole pickle
        else:
            _inspect(file)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # a hostile or damaged file may make it raise anything
        return []


def _refused(names: list[str]) -> str:
    if not names:
        return "torch.save does not write such a pickle. Copy the file again, or load another checkpoint."
    return (
        f"it refers to {', '.join(names)}, besides tensors and plain values. Reading it could run any code. If you "
        "trust its author, allow these names around the call with torch.serialization.safe_globals([...])."
    )


def _inspect(file: IO[bytes]) -> None:
    """Check the records of an archive, and seek to the file's start.

    Raises:
        ValueError: records are compressed or overlap, or their sizes differ from those in the pickle.
    """
    with zipfile.ZipFile(file) as archive:
        sizes = _sizes(archive, file)
        (name,) = (name for name in sizes if name.partition("/")[2] == "data.pkl")
        root = name.removesuffix("data.pkl")
        content = archive.read(name)

    def check_storage(pid: Any) -> Inert:
        _, storage, key, _, num_elements = pid
        num_bytes = num_elements * _ELEMENT_BYTES[storage.name.rpartition(".")[2].removesuffix("Storage")]
        if sizes.get(f"{root}data/{key}") != num_bytes:
            raise ValueError(f"record data/{key} should have {num_bytes} bytes")
        return Inert()

    InertUnpickler(content, check_storage).load()
    file.seek(0)


def _sizes(archive: zipfile.ZipFile, file: IO[bytes]) -> dict[str, int]:
    """Return the number of bytes of each record."""
    num_bytes = file.seek(0, os.SEEK_END)
    records = archive.infolist()
    sizes = {record.filename: record.file_size for record in records}
    if archive.start_dir != _directory_start(file, num_bytes):
        raise ValueError("it has two zip directories")  # torch might read the other one
    if any(
        (record.compress_type, record.compress_size) != (zipfile.ZIP_STORED, record.file_size) for record in records
    ):
        raise ValueError("it has compressed records")
    if sum(sizes.values()) > num_bytes or len({name.casefold() for name in sizes}) < len(records):
        raise ValueError("it has records that overlap")
    if len({name.partition("/")[0] for name in sizes}) != 1:
        raise ValueError("it has records outside of its folder")
    return sizes


def _directory_start(file: IO[bytes], num_bytes: int) -> int:
    """Return where the zip directory begins, from the file's last bytes. torch writes no comment at the end."""
    file.seek(-_END.size, os.SEEK_END)
    signature, start = _END.unpack(file.read(_END.size))
    if signature != b"PK\5\6":
        raise ValueError("it has a comment at its end")
    file.seek(max(0, num_bytes - _END.size - _LOCATOR.size - _END_64.size))
    signature_64, start_64 = _END_64.unpack(file.read(_END_64.size))
    locator, place = _LOCATOR.unpack(file.read(_LOCATOR.size))
    if locator != b"PK\6\7":
        return int(start)
    if signature_64 != b"PK\6\6" or place != num_bytes - _END.size - _LOCATOR.size - _END_64.size:
        raise ValueError("it has two end records")
    return int(start_64)


_END = struct.Struct("<4s12xI2x")
_LOCATOR = struct.Struct("<4s4xQ4x")
_END_64 = struct.Struct("<4s44xQ")
