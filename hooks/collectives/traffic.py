"""Counts what the collectives of a wrapped model move."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]


ReduceOp = dist.ReduceOp.RedOpType


class CollectiveListener(Protocol):
    """Is called with the collectives of the groups of a model."""

    def on_collective(
        self,
        collective: Collective,
        unsharded: torch.Tensor,
        group_name: str,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
    ) -> None:
        """One collective was issued. `unsharded` is the output of an all-gather, the input of the others.

        `op` has no effect on an all-gather or an all-to-all.
        """


class TrafficKey(NamedTuple):
    """What is counted apart."""

    collective: Collective
    dtype: torch.dtype
    group: str
    """The group's name in the plan, or "step" for the statistics of the step."""


@dataclass(slots=True)
class Traffic:
    """Calls and bytes since the last `reset`, on this rank.

    Bytes are those of the unsharded tensor. A ring sends and receives (N - 1) / N of them for an all-gather, a
    reduce-scatter or an all-to-all, and twice that for an all-reduce. Counting reads sizes only, never values.
    """

    enabled: bool = True
    calls: Counter[TrafficKey] = field(default_factory=Counter)
    num_bytes: Counter[TrafficKey] = field(default_factory=Counter)
    observers: list[Callable[[Collective, torch.Tensor, str], None]] = field(default_factory=list)
    """Called with each collective, its unsharded tensor and its group, whether or not counting is enabled."""

    def count(self, collective: Collective, unsharded: torch.Tensor, group: str) -> None:
        """Add one call that moved `unsharded`."""
        for observe in tuple(self.observers):  # one may leave with the TrainStep that it watched, at any moment
            observe(collective, unsharded, group)
        if self.enabled:
            key = TrafficKey(collective, unsharded.dtype, group)
            self.calls[key] += 1
            self.num_bytes[key] += unsharded.nbytes

    def reset(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.num_bytes.clear()

    def by_dtype(self) -> dict[tuple[Collective, torch.dtype], tuple[int, int]]:
        """Return (calls, bytes) per collective and dtype, all groups together."""
        totals: dict[tuple[Collective, torch.dtype], tuple[int, int]] = {}
        for key, calls in self.calls.items():
            before = totals.get((key.collective, key.dtype), (0, 0))
            totals[key.collective, key.dtype] = before[0] + calls, before[1] + self.num_bytes[key]
        return totals
