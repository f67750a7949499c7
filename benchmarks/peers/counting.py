"""Counts calls and bytes of every collective of a step, in the same way for all engines.

Every collective, issued from Python or from C++ (as in DDP), of one tensor or of several, passes through the dispatcher
as an op of the namespace "c10d" or "_c10d_functional". It is counted there. Bytes are those of the unsharded tensor:
the output of an all-gather, the input of a reduction or an all-to-all. An all-reduce moves twice the bytes of a
reduce-scatter of its size.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_OUTPUT, _INPUT = 0, 1
_COLLECTIVES = {  # op -> (name here, which argument is unsharded)
    "c10d::_allgather_base_": ("all_gather", _OUTPUT),
    "c10d::allgather_": ("all_gather", _OUTPUT),
    "c10d::allgather_coalesced_": ("all_gather", _OUTPUT),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", _OUTPUT),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", _INPUT),
    "c10d::reduce_scatter_": ("reduce_scatter", _INPUT),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", _INPUT),
    "c10d::alltoall_base_": ("all_to_all", _INPUT),
    "c10d::alltoall_": ("all_to_all", _INPUT),
    "c10d::allreduce_": ("all_reduce", _OUTPUT),
    "c10d::allreduce_coalesced_": ("all_reduce", _OUTPUT),
    "c10d::broadcast_": ("broadcast", _OUTPUT),
    "c10d::reduce_": ("reduce", _OUTPUT),
    "_c10d_functional::all_reduce": ("all_reduce", _OUTPUT),
    "_c10d_functional::all_reduce_": ("all_reduce", _OUTPUT),
}
_NOTHING_MOVES = ("c10d::barrier", "c10d::monitored_barrier_", "_c10d_functional::wait_tensor")


class Moved(NamedTuple):
    """Key of a count."""

    collective: str
    dtype: torch.dtype


class Collectives(TorchDispatchMode):
    """Counts while it is active, on every thread that computes for this one.

    A dispatch mode slows the step down and may change the last bits of results: no step that is counted is timed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Moved] = Counter()
        self.num_bytes: Counter[Moved] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: Any) -> None:
        if op in _NOTHING_MOVES:
            return
        if op not in _COLLECTIVES:
            raise NotImplementedError(f"a collective that is not counted yet: {op}")
        name, unsharded = _COLLECTIVES[op]
        tensors = list(_tensors(args[unsharded]))
        keys = {Moved(name, tensor.dtype) for tensor in tensors}
        self.calls.update(keys)
        for tensor in tensors:
            self.num_bytes[Moved(name, tensor.dtype)] += tensor.nbytes

    def totals(self) -> dict[tuple[str, torch.dtype], tuple[int, int]]:
        """Return (calls, bytes) per collective and dtype."""
        return {(key.collective, key.dtype): (calls, self.num_bytes[key]) for key, calls in self.calls.items()}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
