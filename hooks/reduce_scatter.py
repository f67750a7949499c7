"""The gradient reduction of one typed group: which dtype is on the wire, and which dtype sums.

[Note: Summing in fp32]
Under autocast the raw gradient of a safe parameter is already in the low precision, so sending it so loses nothing. The
loss of a native low-precision reduce-scatter is in its partial sums. Here each rank sends every other rank its chunk
as it is (all-to-all, the same bytes as a reduce-scatter), and sums what it received in fp32, ranks in order 0, 1, 2, ….
That is the fp32 reduction of the same gradients at half the bytes, and deterministic.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from zeroamp.hooks._fsdp import ReduceScatter, reduce_scatter


class WireReduceScatter(ReduceScatter):
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`.

    FSDP2 asks `allocate` for the unsharded input, copies the gradients into it (casting), asks for the sharded output,
    and calls. The input is given in `wire_dtype`, so no staging copy in the accumulate dtype exists. One per group.
    """

    def __init__(self, wire_dtype: torch.dtype, accumulate: Literal["fp32", "native"], world_size: int) -> None:
        self.wire_dtype = wire_dtype
        self.accumulate = accumulate
        self.world_size = world_size  # of the mesh axis that shards
        # Elements of an input whose output was not yet asked for: how `allocate` tells the two apart.
        self._pending_input_numel: int | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty 1-D tensor: the input in `wire_dtype`, the output in the dtype that sums.

        `dtype` is FSDP2's reduce dtype, the one that gradients accumulate in.
        """
        numel = math.prod(int(length) for length in size)
        is_output = self._pending_input_numel == numel * self.world_size
        self._pending_input_numel = None if is_output else numel
        sums_on_arrival = is_output and self.accumulate == "fp32"
        return torch.empty(numel, dtype=dtype if sums_on_arrival else self.wire_dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` (unsharded, wire dtype) into `output_tensor` (this rank's shard)."""
        if async_op:
            raise AssertionError("expected FSDP2 to reduce on its own stream, got async_op=True")
        if input_tensor.dtype == output_tensor.dtype:
            reduce_scatter(output_tensor, input_tensor, group, op)
        else:
            _sum_in_rank_order(output_tensor, input_tensor, group, op)


def _sum_in_rank_order(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any
) -> None:
    # See [Note: Summing in fp32].
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise AssertionError(f"expected SUM or AVG, got {op}")
    received = torch.empty_like(input_tensor)  # one chunk from every rank, wire dtype
    dist.all_to_all_single(received, input_tensor, group=group)
    chunks = received.view(group.size(), -1)
    output_tensor.copy_(chunks[0])
    for chunk in chunks[1:]:
        output_tensor.add_(chunk)  # promotes to fp32
    if op == dist.ReduceOp.AVG:
        output_tensor.div_(group.size())
