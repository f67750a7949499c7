"""Sums over the ranks of one mesh axis (shards or replicas), in the order that `tree_sum.py` defines.

[Note: Summing in fp32]
Under autocast the raw gradient of a safe parameter is already in the low precision, so communicating it in that dtype
loses nothing. A native low-precision reduce-scatter loses bits in its partial sums. Here each rank sends every other
rank its chunk unchanged (an all-to-all, the same bytes as a ring's reduce-scatter), and sums what it received in fp32,
in the order of the tree. That is the fp32 reduction of the same gradients at half the bytes. fp32 gradients are summed
the same way, with the bytes of a ring's reduce-scatter.

[Note: All-reduce in tree order]
An all-reduce is the same exchange and sum of chunks, and then an all-gather of the sums. It moves the bytes of a ring's
all-reduce. The order of a backend's own all-reduce is not defined.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.fsdp import all_gather
from zeroamp.hooks.collectives.tree_sum import tree_sum

if TYPE_CHECKING:
    from zeroamp.two_level.nodes import Nodes


def exchange(
    chunks: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, nodes: "Nodes | None" = None
) -> torch.Tensor:
    """Send each rank its chunk, so that every rank has the terms of its own sum: see [Note: Summing in fp32].

    Args:
        chunks: (N x M,), contiguous, one chunk for each of the N ranks of the group, in their order. May be
            overwritten.
        received: like `chunks`. Overwritten.
        group: the ranks.
        nodes: the two levels of the group. None: one level.

    Returns:
        (N, M), or (number of nodes, M): the rows for `tree_sum`, as a view of the memory of the arguments.
    """
    if nodes is not None:
        return nodes.exchange(chunks, received)
    dist.all_to_all_single(received, chunks, group=group)
    return received.view(group.size(), -1)


def all_reduce_in_tree_order(
    tensor: torch.Tensor, group: dist.ProcessGroup, divide_by: float = 1, nodes: "Nodes | None" = None
) -> None:
    """Sum a tensor over the ranks of `group`, in place: see [Note: All-reduce in tree order].

    Allocates about as much memory as the tensor has, before it issues the first collective.

    Args:
        tensor: 1-D, contiguous, fp32. If the number of ranks does not divide its size, a padded copy is summed.
        group: the ranks, in the order of the tree.
        divide_by: divides the sum.
        nodes: the two levels of the group. None: one level.
    """
    num_ranks, numel = group.size(), tensor.numel()
    length = -(-numel // num_ranks)
    chunks = tensor
    if length * num_ranks != numel:
        chunks = tensor.new_zeros(length * num_ranks)
        chunks[:numel].copy_(tensor)
    received, total = torch.empty_like(chunks), tensor.new_empty(length)
    tree_sum(exchange(chunks, received, group, nodes), total, divide_by)
    if nodes is not None:
        nodes.all_gather(chunks, total)
    else:
        all_gather(chunks, total, group, async_op=False)
    if chunks is not tensor:
        tensor.copy_(chunks[:numel])
