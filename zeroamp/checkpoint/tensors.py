"""Writes and reads the files of a checkpoint, without running code from them.

Tensors are written and read by torch.distributed.checkpoint. Its `.metadata`, which it unpickles freely, is unpickled
with torch's own metadata classes alone. Files of `torch.save` are read with `weights_only=True`.
"""

import os
import pickle
from collections.abc import Collection
from enum import EnumMeta
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from zeroamp.checkpoint.manifest import METADATA
from zeroamp.policies.errors import CheckpointError, error_text
from zeroamp.rank_group import RankGroup
from zeroamp.weights.files import MANIFEST
from zeroamp.weights.untrusted_files import open_regular

_OF_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    (_OF_METADATA, "ChunkStorageMetadata"),
    (_OF_METADATA, "Metadata"),
    (_OF_METADATA, "MetadataIndex"),
    (_OF_METADATA, "StorageMeta"),
    (_OF_METADATA, "TensorProperties"),
    (_OF_METADATA, "TensorStorageMetadata"),
    (_OF_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name from Python 3.13 on
}
"""Names in the `.metadata` of tensors. `BytesStorageMetadata` is left out: torch unpickles such entries freely."""


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, ranks: RankGroup) -> list[str]:
    """Write tensors into the folder `path`, which must not contain any yet. Every rank of `ranks` calls this.

    Returns:
        The names of the files that this rank wrote. They are on the disk.

    Raises:
        CheckpointError: on all ranks, if any rank could not write or is lost.
    """
    # By default torch copies ahead on a stream of the current GPU, also for staged tensors, which are on the CPU. In
    # the thread of a background save, the current GPU is GPU 0 on every rank.
    writer = FileSystemWriter(path, sync_files=True, per_thread_copy_ahead=0)
    try:
        ranks.communicate(lambda group: save(tensors, storage_writer=writer, process_group=group))
    except CheckpointException as error:  # its own text has tracebacks
        texts = {ranks.ranks[number]: error_text(failure) for number, (failure, _) in error.failures.items()}
        raise CheckpointError("; ".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))) from error
    shards = [file.name for file in path.glob(f"__{ranks.rank}_*")]
    return [METADATA, *shards] if ranks.rank == 0 else shards


class CheckpointReader(FileSystemReader):
    """torch's `FileSystemReader`, which reads only files that the manifest lists, and runs no code from them."""

    def __init__(self, path: str | os.PathLike[str], files: Collection[str]) -> None:
        """`files`: the file names in the manifest of the checkpoint at `path`."""
        super().__init__(path)
        self._folder = os.fspath(path)
        self._files = files
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Return torch's description of the tensors in the checkpoint.

        Raises:
            CheckpointError: the file cannot be read, or names anything but torch's metadata and files of the manifest.
        """
        if self._metadata is None:
            path = os.path.join(self._folder, METADATA)
            try:
                with open_regular(path) as file:
                    metadata = _MetadataUnpickler(file).load()
                self._check(metadata)
            except CheckpointError:
                raise
            except Exception as error:  # a damaged file may make the unpickler raise anything
                raise CheckpointError(
                    f"{path} must hold the metadata of torch.distributed.checkpoint, but cannot be read as such: "
                    f"{type(error).__name__}: {error}. Load another checkpoint."
                ) from error
            self._metadata = metadata
        return self._metadata

    def _check(self, metadata: Any) -> None:
        if not isinstance(metadata, Metadata):
            raise TypeError(f"expected metadata, got {type(metadata).__name__}")
        for entry in metadata.state_dict_metadata.values():
            if not isinstance(entry, TensorStorageMetadata):
                raise TypeError(f"expected a description of a tensor, got {type(entry).__name__}")
        for place in metadata.storage_data.values():
            self._check_listed(place.relative_path)

    def read_values(self, name: str) -> Any:
        """Return the content of one of the checkpoint's own files of `torch.save`: tensors on the CPU, plain values.

        Raises:
            CheckpointError: the manifest does not list the file, it cannot be read, or it names classes or functions
                other than those of tensors.
        """
        self._check_listed(name)
        path = Path(self._folder) / name
        try:
            with open_regular(path) as file:
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's text explains how to switch the check off
            raise CheckpointError(
                f"{path} is not read, because it refers to {', '.join(unsafe_names(path)) or 'more'} besides tensors "
                "and plain values. Reading it could run any code. If you trust its author, allow these names around "
                "the call with torch.serialization.safe_globals([...])."
            ) from error
        except Exception as error:  # a damaged file may make torch raise anything
            raise CheckpointError(
                f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {error}). Copy it again, or "
                "load another checkpoint."
            ) from error

    def _check_listed(self, name: str) -> None:
        if name not in self._files:
            raise CheckpointError(
                f"{os.path.join(self._folder, MANIFEST)} must list every file of the checkpoint, but has no record of "
                f"{name}. Load another checkpoint."
            )

    def read_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read this rank's part of every tensor, in place. Each rank plans its reads alone, without communication.

        Raises:
            CheckpointError: a file does not hold the parts that `.metadata` describes.
        """
        planner = DefaultLoadPlanner()
        metadata = self.read_metadata()
        try:
            planner.set_up_planner(tensors, metadata, is_coordinator=False)
            self.set_up_storage_reader(metadata, is_coordinator=False)
            plan = self.prepare_local_plan(planner.create_local_plan())
            self.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # a damaged file may make torch raise anything
            # torch's text of an UnpicklingError begins with how to switch the check off.
            text = str(error).rpartition("WeightsUnpickler error: ")[2]
            raise CheckpointError(
                f"The tensors in {self._folder} cannot be read ({type(error).__name__}: {text}). Load another "
                "checkpoint."
            ) from error


def _member(enum: Any, name: str) -> Any:
    """Stand in for `getattr`, by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
    if not isinstance(enum, EnumMeta):
        raise TypeError(f"expected an enum, got {enum!r}")
    return enum[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA} refers to {module}.{name}, which is not part of the metadata of torch.distributed.checkpoint. "
            "Reading it could run any code. Load another checkpoint."
        )


def unsafe_names(file: Path | IO[bytes]) -> list[str]:
    """Return the classes and functions that a file of `torch.save` names, except those of tensors; [] if unreadable."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # a damaged file may make torch raise anything
        return []
