"""The all-gather of one typed group: FSDP2's own, counted and named."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.fsdp import AllGather, all_gather
from zeroamp.hooks.collectives.traffic import CollectiveListener, Traffic
from zeroamp.hooks.observers.ranges import Ranges
from zeroamp.policies.dtypes import short_name


@dataclass(slots=True, kw_only=True, eq=False)
class CountingAllGather(AllGather):
    """An all-gather for `FSDPModule.set_custom_all_gather`. One per group.

    Its dtype is the group's `param_dtype`: FSDP2 casts each shard before it copies it in. The output buffers are left
    to the allocator: FSDP2 holds one while the next is filled, and its prefetching decides how many are in flight.
    """

    group_name: str
    traffic: Traffic
    listeners: Sequence[CollectiveListener] = ()
    ranges: Ranges = field(default_factory=Ranges)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty 1-D tensor for the gathered group."""
        return torch.empty(math.prod(int(length) for length in size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` (this rank's shards) into `output_tensor` (all ranks')."""
        self.traffic.count("all_gather", output_tensor, self.group_name)
        with self.ranges.inside("all_gather", f"{self.group_name} {short_name(output_tensor.dtype)}"):
            work = all_gather(output_tensor, input_tensor, group, async_op=async_op)
        for listener in self.listeners:
            listener.on_collective("all_gather", output_tensor, self.group_name, group, dist.ReduceOp.SUM)
        return work
