"""The all-gather of one parameter group in symmetric memory: FSDP2's own, with listeners and a label."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.fsdp import AllGather
from zeroamp.hooks.collectives.all_gather import GroupAllGather
from zeroamp.hooks.collectives.issued import NamedWork, issue
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.hooks.observers.trace_labels import label


@dataclass(slots=True, kw_only=True, eq=False)
class SymmetricGather(GroupAllGather):
    """A `GroupAllGather` that delegates to FSDP2's all-gather in symmetric memory. One per group."""

    symmetric: AllGather
    """From `symmetric_all_gather`, shared by all groups of a model."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty 1-D tensor for the unsharded group, in symmetric memory."""
        return self.symmetric.allocate(size, dtype=dtype, device=device)

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
        with label("all_gather", self.group_name, output_tensor.dtype):
            issued = IssuedCollective("all_gather", output_tensor, self.group_name, group)
            work = issue(lambda: self.symmetric(output_tensor, input_tensor, group, async_op), issued, self.listeners)
        return work if work is None else NamedWork(work, issued, self.listeners)
