"""Writes the tensors of a checkpoint with torch.distributed.checkpoint, and computes the files' digests meanwhile."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from zeroamp.checkpoint.manifest import FileRecord
from zeroamp.policies.errors import CheckpointError, error_text
from zeroamp.rank_group import RankGroup

_BYTES_AHEAD = 10_000_000
"""How many bytes torch copies ahead from an accelerator while it writes; torch's default."""


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, ranks: RankGroup) -> dict[str, FileRecord]:
    """Write tensors into the folder `path`, which must not contain any yet. Every rank of `ranks` calls this.

    Returns:
        The records of the files that this rank wrote.

    Raises:
        CheckpointError: on all ranks, if any rank could not write or is lost.
    """
    # Tensors on the CPU are staged ones. By default torch synchronizes a stream of the current GPU for these, too: in
    # the thread of a background save that is GPU 0 on every rank.
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in tensors.values())
    writer = FileSystemWriter(path, sync_files=True, per_thread_copy_ahead=0 if is_on_cpu else _BYTES_AHEAD)
    writer.fs = files = _HashingFileSystem()
    try:
        ranks.communicate(lambda group: save(tensors, storage_writer=writer, process_group=group))
    except CheckpointException as error:  # its own text has tracebacks
        texts = {ranks.ranks[number]: error_text(failure) for number, (failure, _) in error.failures.items()}
        raise CheckpointError("; ".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))) from error
    return files.records


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingFile(cast(IO[bytes], stream))
            yield hashing
        self.records[Path(path).name] = FileRecord(num_bytes=hashing.num_bytes, sha256=hashing.hash.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashingFile:
    """Hashes and counts the bytes that are written to a file. It does not support `seek`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = sha256()
        self.num_bytes = 0
        self.flush, self.fileno, self.close = file.flush, file.fileno, file.close

    def write(self, content: Any) -> int:
        num_bytes = self._file.write(content)
        self.hash.update(content)
        self.num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self.num_bytes
