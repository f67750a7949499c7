"""Writes and reads the tensors of a checkpoint: the steps of torch.distributed.checkpoint, on a `RankGroup`.

    plan     each rank lists its parts of tensors; the first rank chooses which rank writes which, and describes all
    write    each rank writes its parts into one file, and computes the file's digest while it writes
    finish   the first rank writes `.metadata`, which has the place of each part

torch's `save` and `load` run the same steps. The first rank caches the messages of a save, so a rank sends only
messages that changed since the model's last save. A load exchanges no plans, because each rank can plan its reads
alone.

torch has a cache of plans too (`enable_plan_caching`). That cache does not compare dtypes, so a tensor that was cast
since the last save would be described in its old dtype.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from zeroamp.checkpoint.manifest import FileRecord
from zeroamp.rank_group import RankGroup


@dataclass(slots=True)
class PlanCache:
    """Messages of a model's last save: on each rank those that it sent, on the first rank also those of all ranks."""

    ranks: RankGroup | None = None
    """The ranks of the last save. If they change, the cache is emptied."""
    sent_plan: bytes = b""
    """Digest of this rank's list of parts."""
    plan: SavePlan | None = None
    """The parts that this rank writes."""
    sent_results: bytes = b""
    """Digest of the places of the parts that this rank wrote."""
    plans: list[SavePlan] = field(default_factory=list)
    """The first rank's: the lists of all ranks."""
    metadata: Metadata | None = None
    """The first rank's: the description of all tensors."""
    results: list[list[WriteResult]] = field(default_factory=list)
    """The first rank's: the places of the parts of all ranks."""

    def clear(self, ranks: RankGroup) -> None:
        """Empty the cache, and use it for `ranks` from now on."""
        self.ranks, self.plan, self.metadata = ranks, None, None
        self.sent_plan = self.sent_results = b""
        self.plans, self.results = [], []


def save_tensors(
    tensors: dict[str, torch.Tensor], path: Path, ranks: RankGroup, cache: PlanCache
) -> dict[str, FileRecord]:
    """Write tensors into the folder `path`, which must not contain any yet. Every rank of `ranks` calls this.

    Returns:
        The records of the files that this rank wrote.

    Raises:
        CheckpointError: on all ranks, if any rank could not write.
    """
    if cache.ranks is not ranks:
        cache.clear(ranks)
    writer, planner = _Writer(path), DefaultSavePlanner()
    digests = [b"", b""]

    def plan() -> SavePlan | None:
        writer.set_up_storage_writer(ranks.rank == 0, rank=ranks.rank, use_collectives=True)
        planner.set_up_planner(tensors, writer.storage_meta(), ranks.rank == 0)
        own = writer.prepare_local_plan(planner.create_local_plan())
        digests[0] = _digest(own)
        return None if digests[0] == cache.sent_plan else own

    def choose(sent: list[SavePlan | None]) -> list[SavePlan | None]:
        if not any(sent):
            return sent
        plans = _merged(cache.plans, sent)
        of_ranks, metadata = planner.create_global_plan(plans)
        replies = writer.prepare_global_plan(of_ranks)
        cache.plans, cache.metadata = plans, metadata
        return list(replies)

    chosen = ranks.reduce(plan, choose)[ranks.rank]
    cache.sent_plan, cache.plan = digests[0], chosen or cache.plan

    def write() -> list[WriteResult] | None:
        if cache.plan is None:
            raise AssertionError("expected the plan of an earlier save, got None")
        written = writer.write_data(planner.finish_plan(cache.plan), planner)
        written.wait()
        digests[1] = _digest(written.value())
        return None if digests[1] == cache.sent_results else written.value()

    def finish(sent: list[list[WriteResult] | None]) -> None:
        if cache.metadata is None:
            raise AssertionError("expected the metadata of an earlier save, got None")
        results = _merged(cache.results, sent)
        writer.finish(cache.metadata, results)
        cache.results = results

    ranks.reduce(write, finish)
    cache.sent_results = digests[1]
    return writer.records


def load_tensors(tensors: dict[str, torch.Tensor], reader: StorageReader) -> None:
    """Read this rank's part of every tensor, in place, without communication."""
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _digest(value: object) -> bytes:
    return sha256(pickle.dumps(value)).digest()


def _merged(before: list[Any], sent: list[Any]) -> list[Any]:
    """Return the message of each rank: from `sent`, or from `before` if the rank sent None."""
    return [before[rank] if value is None else value for rank, value in enumerate(sent)]


class _Writer(FileSystemWriter):
    """Torch's writer, which also computes the digest of each file while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.fs: _HashingFileSystem = _HashingFileSystem()

    @property
    def records(self) -> dict[str, FileRecord]:
        """The records of the files that this rank wrote."""
        return self.fs.records


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingFile(cast(IO[bytes], stream))
            yield hashing
        self.records[Path(path).name] = hashing.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashingFile:
    """Hashes and counts the bytes that are written to a file. It does not support `seek`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = sha256()
        self._num_bytes = 0

    @property
    def record(self) -> FileRecord:
        return FileRecord(num_bytes=self._num_bytes, sha256=self._hash.hexdigest())

    def write(self, content: Any) -> int:
        num_bytes = self._file.write(content)
        self._hash.update(content)
        self._num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
