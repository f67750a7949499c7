"""Listeners to the collectives of a wrapped model, and the listener that counts calls and bytes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
ReduceOp = dist.ReduceOp.RedOpType

STEP = "step"
"""The group name of `TrainStep`'s own collective, the all-reduce of an optimizer step's statistics."""


class IssuedCollective(NamedTuple):
    """One collective that a wrapped model issued, on this rank."""

    collective: Collective
    tensor: torch.Tensor
    """The unsharded tensor: the output of an all-gather, the input of the others."""
    group_name: str
    """The name of the parameter group in the plan, or `STEP`."""
    process_group: dist.ProcessGroup | None
    """None for the default group."""
    op: ReduceOp = dist.ReduceOp.SUM
    """The op of a reduction. An all-gather or an all-to-all has none, and has SUM here."""


class CollectiveListener(Protocol):
    """Is called after each collective that a wrapped model issued on this rank."""

    def on_collective(self, issued: IssuedCollective) -> None:
        """Handle one collective. Must not change its tensor, and must not retain a reference to it."""


def notify(listeners: Sequence[CollectiveListener], issued: IssuedCollective) -> None:
    """Call `on_collective` of every listener."""
    for listener in tuple(listeners):  # copied: a listener may be removed during the call, with its TrainStep
        listener.on_collective(issued)


@contextmanager
def listening(listeners: list[CollectiveListener], listener: CollectiveListener) -> Iterator[None]:
    """Call a listener for the collectives that are issued inside the context."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners[:] = [other for other in listeners if other is not listener]


class TrafficKey(NamedTuple):
    """Collective, dtype and group. `Traffic` has one counter for each."""

    collective: Collective
    dtype: torch.dtype
    group: str
    """The name of the parameter group in the plan, or `STEP`."""


@dataclass(slots=True)
class Traffic:
    """Counts the calls and bytes of this rank's collectives since the last `reset`.

    Bytes are those of the unsharded tensor. On N ranks, a ring sends and receives (N - 1) / N of these bytes for an
    all-gather, a reduce-scatter or an all-to-all, and twice that for an all-reduce. Only sizes are read, no values.
    """

    enabled: bool = True
    """Whether calls are counted now. False in the steps that `explain(model).verify` runs."""
    _calls: Counter[TrafficKey] = field(default_factory=Counter)
    _num_bytes: Counter[TrafficKey] = field(default_factory=Counter)
    _seen: dict[tuple[Collective, torch.dtype, str, int], int] = field(default_factory=dict)
    """Collective, dtype, group and elements -> calls that are not in the two counters yet. Counting here is faster, and
    runs in each training step. Reading `calls` or `num_bytes` moves these calls into the counters."""

    @property
    def calls(self) -> Counter[TrafficKey]:
        """Number of calls by collective, dtype and group."""
        self._sort_out()
        return self._calls

    @property
    def num_bytes(self) -> Counter[TrafficKey]:
        """Bytes of the unsharded tensors by collective, dtype and group."""
        self._sort_out()
        return self._num_bytes

    def on_collective(self, issued: IssuedCollective) -> None:
        """Add one call and the bytes of its tensor."""
        if self.enabled:
            collective, tensor, group_name, _, _ = issued
            seen = collective, tensor.dtype, group_name, tensor.numel()
            self._seen[seen] = self._seen.get(seen, 0) + 1

    def _sort_out(self) -> None:
        for (collective, dtype, group_name, numel), calls in self._seen.items():
            key = TrafficKey(collective, dtype, group_name)
            self._calls[key] += calls
            self._num_bytes[key] += calls * numel * dtype.itemsize
        self._seen.clear()

    def reset(self) -> None:
        """Set all counters to zero."""
        self._seen.clear()
        self._calls.clear()
        self._num_bytes.clear()

    def by_dtype(self) -> dict[tuple[Collective, torch.dtype], tuple[int, int]]:
        """Return (calls, bytes) per collective and dtype, all groups together."""
        totals: dict[tuple[Collective, torch.dtype], tuple[int, int]] = {}
        for key, calls in self.calls.items():
            before = totals.get((key.collective, key.dtype), (0, 0))
            totals[key.collective, key.dtype] = before[0] + calls, before[1] + self.num_bytes[key]
        return totals
