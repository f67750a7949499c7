"""Checks the order of ops on streams without an accelerator: FSDP2's CPU streams are replaced by ones with clocks.

On a CPU every op runs at once, but FSDP2 makes the same streams, events and waits as on CUDA. `Streams` records for
each op the stream in which it would run, and the memory that it reads and writes. By vector clocks it finds each pair
of ops on the same memory of which neither is ordered after the other, as torch's sanitizer for CUDA does.

A caching allocator reuses freed memory for the next allocation in the stream in which the memory was allocated. So each
use of freed memory must be ordered before the next allocation in that stream. Uses in streams that were passed to
`record_stream` are excepted: the allocator waits for them.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroamp.hooks import tensors

Clock = dict[int, int]

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
"""Ops that launch nothing on a device."""

WRITTEN = {
    "alltoall_base_": 0,
    "_allgather_base_": 0,
    "_reduce_scatter_base_": 0,
    "allreduce_": 0,
    "all_gather_copy_in": 1,
}
"""Ops whose schemas do not mark the argument that they write -> position of that argument."""


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class Event(torch.cpu.Event):
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        self.clock = dict((stream or torch.cpu.current_stream()).clock)

    def wait(self, stream: Any = None) -> None:
        (stream or torch.cpu.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _merge(Stream.host, self.clock)


class Stream(torch.cpu.Stream):
    host: ClassVar[Clock] = {}
    """The clock of what the host has waited for, which precedes all ops that are launched later."""
    num_streams = 0

    def __init__(self, priority: int = -1) -> None:
        Stream.num_streams += 1
        self.index, self.clock = Stream.num_streams, {}

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        _merge(self.clock, stream.clock)


@dataclass(slots=True)
class _Memory:
    """The uses of one storage: (stream, time) of the last write, and stream -> time of reads since."""

    reference: StorageWeakRef
    made_in: int
    num_bytes: int
    write: tuple[int, int]
    reads: Clock = field(default_factory=dict)
    by: str = ""
    held_for: set[int] = field(default_factory=set)
    """Streams that were passed to `record_stream`."""

    def uses(self) -> Clock:
        uses = dict(self.reads)
        uses[self.write[0]] = max(uses.get(self.write[0], 0), self.write[1])
        return uses


class Streams(TorchDispatchMode):
    """`races`: descriptions of ops that are not ordered. `num_ops`: stream -> ops that ran in it.

    Enter before the first forward of the model, which makes the streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.num_ops: Clock = {}
        self._memory: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []

    def __enter__(self) -> "Streams":
        self._originals = torch.cpu.Stream, torch.cpu.Event, torch.cpu._current_stream, torch.accelerator.current_stream
        self._has_streams = tensors.has_streams
        Stream.host, Stream.num_streams = {}, 0
        torch.cpu.Stream, torch.cpu.Event, torch.cpu._current_stream = Stream, Event, Stream()
        torch.accelerator.current_stream = lambda *_: torch.cpu.current_stream()
        torch.Tensor.record_stream = lambda tensor, stream: self._hold(tensor, stream)  # noqa: PLW0108  # binds tensor
        tensors.has_streams = lambda _device: True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.cpu.Stream, torch.cpu.Event, torch.cpu._current_stream, torch.accelerator.current_stream = self._originals
        del torch.Tensor.record_stream  # what is left is that of its base class
        tensors.has_streams = self._has_streams

    def _hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        for key in _storages(tensor):
            if key in self._memory:
                self._memory[key].held_for.add(stream.index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream, kwargs = torch.cpu.current_stream(), kwargs or {}
        _merge(stream.clock, Stream.host)
        name = func._schema.name.split("::")[1]
        if name not in ALLOCATIONS:
            stream.clock[stream.index] = stream.clock.get(stream.index, 0) + 1
            self.num_ops[stream.index] = self.num_ops.get(stream.index, 0) + 1
        written = self._written(func, name, args, kwargs)
        is_view = getattr(func, "is_view", False) or name == "detach"
        if not is_view and name not in ALLOCATIONS:
            read = {key: storage for key, storage in _storages((args, kwargs)).items() if key not in written}
            for key in read:
                self._read(key, read[key], stream, name)
            for key in written:
                self._write(key, written[key], stream, name)
        result = func(*args, **kwargs)
        for key, storage in _storages(result).items():
            if key not in self._memory and storage.nbytes() > 0:
                self._allocate(key, storage, stream, name)
        return result

    def _written(self, func: Any, name: str, args: Any, kwargs: Any) -> dict[int, Any]:
        if name in WRITTEN:
            return _storages(args[WRITTEN[name]])
        written = {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name, args[position] if position < len(args) else None)
                written |= _storages(value)
        return written

    def _find_freed(self) -> None:
        for key, memory in list(self._memory.items()):
            is_expired = memory.reference.expired()
            if is_expired or memory.num_bytes != _num_bytes(memory.reference):  # FSDP2 resizes storages to 0
                del self._memory[key]
                self._freed.append(memory)

    def _allocate(self, key: int, storage: Any, stream: Stream, name: str) -> None:
        self._find_freed()
        left = []
        for memory in self._freed:
            if memory.made_in != stream.index:
                left.append(memory)
                continue
            late = {index for index, time in memory.uses().items() if stream.clock.get(index, 0) < time}
            if late := late - memory.held_for:
                self.races.append(
                    f"{name} in stream {stream.index} may get memory of {memory.by} that stream {late} still uses"
                )
        self._freed = left
        time = stream.clock.get(stream.index, 0)
        self._memory[key] = _Memory(
            StorageWeakRef(storage), stream.index, storage.nbytes(), (stream.index, time), by=name
        )

    def _read(self, key: int, storage: Any, stream: Stream, name: str) -> None:
        memory = self._memory.get(key)
        if memory is None:
            if storage.nbytes() > 0:
                self._allocate(key, storage, stream, name)
            return
        index, time = memory.write
        if stream.clock.get(index, 0) < time:
            self.races.append(
                f"{name} in stream {stream.index} reads what stream {index} may still write ({memory.by})"
            )
        memory.reads[stream.index] = stream.clock[stream.index]

    def _write(self, key: int, storage: Any, stream: Stream, name: str) -> None:
        memory = self._memory.get(key)
        if memory is None:
            if storage.nbytes() > 0:
                self._allocate(key, storage, stream, name)
            return
        late = {index for index, time in memory.uses().items() if stream.clock.get(index, 0) < time}
        if late:
            self.races.append(f"{name} in stream {stream.index} writes what stream {late} still uses ({memory.by})")
        memory.write, memory.reads, memory.by = (stream.index, stream.clock[stream.index]), {}, name


def _num_bytes(reference: StorageWeakRef) -> int:
    return int(torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes())


def _storages(value: Any) -> dict[int, Any]:
    """Return key -> storage of the tensors in a value; for a DTensor, the storage of its shard."""
    found = {}
    for leaf in tree_leaves(value):
        tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
    return found
