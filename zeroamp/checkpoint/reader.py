"""Reads a checkpoint of `torch.distributed.checkpoint` without running anything that it might hold."""

import os
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from zeroamp.checkpoint.files import METADATA
from zeroamp.policies.errors import CheckpointError, describe

_METADATA_NAMES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}
_SAFE = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_NAMES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name from Python 3.13 on
}


class SafeReader(FileSystemReader):
    """Torch's reader. Its own one unpickles `.metadata` whatever is in it; this one takes the metadata's classes only.

    Tensors are read with `weights_only=True` by both.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Return what the checkpoint holds.

        Raises:
            CheckpointError: the file names anything that is not part of such metadata.
        """
        path = os.fspath(self.path / METADATA)  # type: ignore[operator]  # a path, for a file system
        with open(path, "rb") as file:
            try:
                metadata = _MetadataUnpickler(file, path).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, ValueError) as error:
                raise CheckpointError(
                    describe(path, f"{type(error).__name__}: {error}", "a checkpoint's metadata", "Load another one.")
                ) from error
        if not isinstance(metadata, Metadata):
            found = f"a {type(metadata).__name__}"
            raise CheckpointError(describe(path, found, "a checkpoint's metadata", "Load another one."))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _SAFE or is_dtype:
            return super().find_class(module, name)
        raise CheckpointError(
            describe(
                self._path,
                f"a pickle of {module}.{name}",
                "the metadata of torch.distributed.checkpoint, and nothing else",
                "Do not load it: no writer of checkpoints puts such a thing there.",
            )
        )
