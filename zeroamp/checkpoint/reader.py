"""`SafeReader`: reads the tensors of a checkpoint from untrusted files.

`.metadata` has the shape, dtype and chunks of every tensor, and the file and byte range of every chunk. torch's reader
does not check it. If chunks left gaps, parts of the caller's tensor would keep their old values.
"""

import io
import math
import os
from bisect import bisect_right, insort
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from zeroamp.checkpoint.archives import Inert, InertUnpickler, load_archive
from zeroamp.checkpoint.manifest import METADATA
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.files import MANIFEST
from zeroamp.weights.untrusted_files import open_regular, read_regular

_MAX_METADATA_BYTES = 1024**3
"""Enough for 1,000 tensors in 7,000 chunks each: a chunk takes about 150 bytes."""
_MAX_DIMS = 64
"""The largest number of dimensions of a torch tensor."""
_OF_METADATA = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}
_KNOWN = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name from Python 3.13 on
    ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3 use it to pickle enum members. It is not called here
}


class SafeReader(FileSystemReader):
    """torch's `FileSystemReader`, which checks everything that it reads.

    Reads `.metadata` once, with inert classes. Refuses it unless the chunks of every tensor fill the tensor exactly,
    and are in files that the manifest lists. Refuses a chunk unless it is a tensor of the size and dtype that
    `.metadata` gives.
    """

    def __init__(self, path: str | os.PathLike[str], files: Collection[str]) -> None:
        """`files`: the file names in the manifest of the checkpoint at `path`."""
        super().__init__(path)
        self._folder = os.fspath(path)
        self._files = files
        self._metadata: Metadata | None = None
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._sizes: dict[MetadataIndex, torch.Size] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Return torch's description of the tensors in the checkpoint.

        Raises:
            CheckpointError: the file cannot be read, has other content, or contradicts itself.
        """
        if self._metadata is None:
            path = os.path.join(self._folder, METADATA)
            try:
                content = read_regular(path, _MAX_METADATA_BYTES)
                self._metadata = self._checked(_MetadataUnpickler(content, path).load())
            except CheckpointError:
                raise
            except Exception as error:  # a hostile or damaged file may make the unpickler raise anything
                raise CheckpointError(
                    f"{path} must hold the metadata of torch.distributed.checkpoint, but cannot be read as such: "
                    f"{type(error).__name__}: {error}. Load another checkpoint."
                ) from error
        return self._metadata

    def read_values(self, name: str, *, mmap: bool = False) -> Any:
        """Return the content of one of the checkpoint's own files of `torch.save`; `mmap` maps its tensors.

        Raises:
            CheckpointError: the manifest does not list the file, or it cannot be read.
        """
        self._check_listed(name)
        path = os.path.join(self._folder, name)
        return load_archive(path, path, mmap=mmap)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts of a plan into the planner's tensors.

        Raises:
            CheckpointError: a chunk differs from its description in `.metadata`.
        """
        for item in plan.items:
            part = self._chunk(item.storage_index)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != part.shape:
                raise AssertionError(f"expected a part of {part.shape} for {item.storage_index}, got {target.shape}")
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        info = self.storage_data[index]
        where = f"{os.path.join(self._folder, info.relative_path)}, from byte {info.offset} on,"
        with open_regular(os.path.join(self._folder, info.relative_path)) as file:
            chunk = load_archive(io.BufferedReader(_Part(file, info.offset, info.length)), where)
        size, dtype = self._sizes[index], self._tensors[index.fqn].properties.dtype
        is_plain = isinstance(chunk, torch.Tensor) and (chunk.layout, chunk.device.type) == (torch.strided, "cpu")
        if not is_plain or (chunk.shape, chunk.dtype) != (size, dtype):
            found = f"{list(chunk.shape)} {chunk.dtype}" if is_plain else f"a {type(chunk).__name__}"
            raise CheckpointError(
                f"{where} must hold the part of {index.fqn} that {METADATA} describes, {list(size)} {dtype}, but holds "
                f"{found}. Load another checkpoint."
            )
        plain: torch.Tensor = chunk.detach()
        return plain

    def _check_listed(self, name: str) -> None:
        if name not in self._files:
            raise CheckpointError(
                f"{os.path.join(self._folder, MANIFEST)} must list every file of the checkpoint, but has no record of "
                f"{name}. Load another checkpoint."
            )

    def _checked(self, content: Any) -> Metadata:
        """Check the content of `.metadata`, and return it in torch's classes.

        Raises:
            Exception: of any class, if torch would not write such content.
        """
        fields = _fields(content, "Metadata")
        places = {_index(index): _fields(info, "_StorageInfo") for index, info in fields["storage_data"].items()}
        num_chunks = 0
        for name, entry in fields["state_dict_metadata"].items():
            tensor = _tensor(entry)
            num_chunks += len(tensor.chunks)
            if num_chunks > len(places):
                raise ValueError("more chunks than places in files")
            _check_covered(name, tensor)
            self._tensors[name] = tensor
            for chunk in tensor.chunks:
                index = MetadataIndex(name, chunk.offsets)
                self._check_place(index, places[index], math.prod(chunk.sizes) * tensor.properties.dtype.itemsize)
                self._sizes[index] = chunk.sizes
        storage_data = {index: _Place(info) for index, info in places.items()}
        return Metadata(dict(self._tensors), storage_data=storage_data, storage_meta=StorageMeta(load_id=self.load_id))

    def _check_place(self, index: MetadataIndex, info: dict[str, Any], num_bytes: int) -> None:
        self._check_listed(info["relative_path"])
        _sizes_of((info["offset"], info["length"]))
        if info["length"] < num_bytes or info.get("transform_descriptors"):
            raise ValueError(f"{index.fqn} has a chunk of {num_bytes} bytes in {info['length']}")


class _Place:
    """The file and byte range of a chunk, with the attributes of torch's `_StorageInfo`."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.relative_path: str = info["relative_path"]
        self.offset: int = info["offset"]
        self.length: int = info["length"]


class _Part(io.RawIOBase):
    """A byte range of a file, as a file object that does not read beyond the range."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        if start + length > file.seek(0, os.SEEK_END):
            raise ValueError(f"it ends before byte {start + length}")
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._position)
        num_read = self._file.readinto(view[: max(0, self._length - self._position)])
        self._position += num_read
        return int(num_read)


class _MetadataUnpickler(InertUnpickler):
    def __init__(self, content: bytes, path: str) -> None:
        super().__init__(content)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(
            f"{self._path} refers to {module}.{name}, which is not part of the metadata of "
            "torch.distributed.checkpoint. Reading it could run any code. Load another checkpoint."
        )


def _fields(content: Any, name: str) -> dict[str, Any]:
    if not isinstance(content, Inert) or content.name.rpartition(".")[2] != name or not isinstance(content.state, dict):
        raise TypeError(f"expected {name}, got {type(content).__name__}")
    return content.state


def _index(content: Any) -> MetadataIndex:
    fields = _fields(content, "MetadataIndex")
    return MetadataIndex(fields["fqn"], _sizes_of(fields["offset"]))


def _sizes_of(values: Any) -> torch.Size:
    is_tuple = isinstance(values, tuple) and len(values) <= _MAX_DIMS
    if not is_tuple or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"sizes and offsets must be integers from 0 on, at most {_MAX_DIMS} of them")
    return torch.Size(values)


def _tensor(content: Any) -> TensorStorageMetadata:
    fields = _fields(content, "TensorStorageMetadata")
    properties = fields["properties"]
    dtype = properties.state[0]
    if properties.name.rpartition(".")[2] != "TensorProperties" or not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected TensorProperties, got {type(properties).__name__}")
    boxes = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    chunks = [ChunkStorageMetadata(_sizes_of(box["offsets"]), _sizes_of(box["sizes"])) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _sizes_of(fields["size"]), chunks)


def _check_covered(name: Any, tensor: TensorStorageMetadata) -> None:
    """Raise ValueError unless the chunks of a tensor fill it, each element once."""
    if not isinstance(name, str):
        raise TypeError(f"expected a name, got {type(name).__name__}")
    num_dims = len(tensor.size)
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == num_dims or any(
            offset + size > whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        ):
            raise ValueError(f"{name} has a chunk outside of it")
    filled = [chunk for chunk in tensor.chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in filled) != math.prod(tensor.size):
        raise ValueError(f"the chunks of {name} do not have the elements of {list(tensor.size)} together")
    _check_apart(name, filled, num_dims)


def _check_apart(name: str, chunks: list[ChunkStorageMetadata], num_dims: int) -> None:
    """Raise ValueError if two chunks overlap. Sweeps along the dimension with the most distinct offsets."""
    along = max(range(num_dims), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=0)
    active: list[tuple[int, int]] = []  # (end, number) of the chunks at the sweep's position
    for number, chunk in sorted(enumerate(chunks), key=lambda item: item[1].offsets[along : along + 1]):
        start, size = (chunk.offsets[along], chunk.sizes[along]) if num_dims else (0, 1)
        del active[: bisect_right(active, (start, len(chunks)))]
        if any(_overlap(chunk, chunks[other], num_dims) for _, other in active):
            raise ValueError(f"two chunks of {name} overlap")
        insort(active, (start + size, number))


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata, num_dims: int) -> bool:
    return all(
        one.offsets[dim] < other.offsets[dim] + other.sizes[dim]
        and other.offsets[dim] < one.offsets[dim] + one.sizes[dim]
        for dim in range(num_dims)
    )
