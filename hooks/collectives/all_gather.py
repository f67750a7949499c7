"""The all-gather of one parameter group: FSDP2's own, with listeners and a label in traces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.fsdp import all_gather
from zeroamp.hooks.collectives.collective_calls import NamedWork, issue
from zeroamp.hooks.collectives.traffic import CollectiveListener, IssuedCollective
from zeroamp.hooks.observers.trace_labels import label
from zeroamp.policies.dtypes import FLOAT8_BY_NAME

if TYPE_CHECKING:
    from zeroamp.two_level.nodes import Nodes


@dataclass(slots=True, kw_only=True, eq=False)
class GroupAllGather:
    """An all-gather for `FSDPModule.set_custom_all_gather`. One per group.

    Its dtype is the group's `param_dtype`: FSDP2 casts each shard and copies it into the input. Each output buffer is
    newly allocated, because FSDP2 uses one while the next is filled, and prefetching decides how many exist at once.
    """

    group_name: str
    nodes: "Nodes | None" = None
    """The two levels of an all-gather over all ranks that shard. None: one level. An all-gather over the fewer ranks of
    a secondary partition (hpZ) always has one level."""
    listeners: Sequence[CollectiveListener] = ()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty 1-D tensor for the unsharded group."""
        return torch.empty(math.prod(map(int, size)), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """All-gather `input_tensor` (1-D, this rank's shards) into `output_tensor` (1-D, the shards of all ranks).

        Both have the group's `param_dtype`. Returns the work to wait for with `async_op`, else None.
        """
        issued = IssuedCollective("all_gather", output_tensor, self.group_name, group)
        with label("all_gather", self.group_name, output_tensor.dtype):
            if output_tensor.dtype in FLOAT8_BY_NAME.values():  # gloo, and NCCL on older GPUs, have no such dtypes
                output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
            work = issue(self._gather, issued, self.listeners, output_tensor, input_tensor, group, async_op)
        return work if work is None else NamedWork(work, issued, self.listeners)

    def _gather(
        self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        if self.nodes is None or group.size() != self.nodes.size():
            return all_gather(output, input, group, async_op=async_op)
        return self.nodes.all_gather(output, input, async_op=async_op)
