"""Reductions and all-gathers over one mesh axis in two levels: inside each node, and between nodes.

[Note: Two levels]
An axis of N = m x g ranks, numbered node by node, has m nodes of g ranks. In one level, an all-to-all over all ranks,
each rank sends (m-1)/m of its gradients to other nodes. In two levels the ranks of a node first exchange their
gradients unchanged. Each rank then holds this node's terms of one chunk for every node, and sums them in fp32. Then the
ranks with the same place in their nodes exchange these partial sums and add them. As g is a power of two, this is the
tree of `tree_sum.py`, bit for bit.

Bytes that leave one node in a reduction of B bytes of bf16 gradients, with 2 nodes of 4 ranks: in one level 2 B; with
partial sums in fp32 1 B, in bf16 0.5 B. In general in one level g B (m-1)/m, in fp32 2 B (m-1)/m.

The all-gather goes the other way: between nodes first, then inside the node. It moves a ring's bytes between nodes, B
(m-1)/m, in m-1 + g-1 steps instead of N-1.

[Note: Partial sums]
"fp32" is exact. "bf16" rounds each partial sum to 7 bits after the leading one (to nearest, ties to even): a relative
error of at most 2^-8 each. Partial sums are added in fp32.

[Note: Pieces]
A large reduction is cut into up to `MOST_PIECES` pieces of columns. While the partial sums of a piece are exchanged
between nodes, the next piece is exchanged inside the node. The two process groups communicate at the same time, over
different links. All ranks issue the collectives in the same order: inside 1, inside 2, across 1, inside 3, across 2, …
Columns are summed on their own, so the bits are the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.fsdp import all_gather
from zeroamp.hooks.collectives.tree_sum import Variant, tree_sum, variant

Partials = Literal["fp32", "bf16"]

MOST_PIECES = 4
BYTES_OF_A_PIECE = 2**25
"""Least bytes of the gradients of a piece. Smaller messages would be bound by latency; not measured on GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Nodes:
    """The two process groups of one axis: see [Note: Two levels]."""

    inside: dist.ProcessGroup
    """The ranks of this node, in their order. Their number is a power of two."""
    across: dist.ProcessGroup
    """The ranks at this rank's place in each node, in the order of the nodes."""
    partials: Partials = "fp32"
    """The dtype in which partial sums leave the node: see [Note: Partial sums]."""

    def size(self) -> int:
        """Return the number of ranks of the axis."""
        return self.inside.size() * self.across.size()

    def sum_over_ranks(
        self, chunks: torch.Tensor, received: torch.Tensor, output: torch.Tensor, divide_by: float = 1
    ) -> None:
        """Exchange chunks inside the node and partial sums between nodes, and sum: see [Note: Pieces].

        Args:
            chunks: (N x M,), contiguous, one chunk for each rank of the axis. Overwritten.
            received: like `chunks`. Overwritten.
            output: (M,) or the first elements of this rank's sum, fp32.
            divide_by: divides the sum.
        """
        num_inside, num_nodes = self.inside.size(), self.across.size()
        by_rank = chunks.view(num_nodes, num_inside, -1)
        pieces = _pieces(by_rank.shape[-1], chunks.numel() * chunks.element_size())
        for piece in pieces:
            sent = _part(received, piece, num_inside * num_nodes).view(num_inside, num_nodes, -1)
            sent.copy_(by_rank[:, :, piece].transpose(0, 1))
        memory = [
            (_part(chunks, piece, num_inside * num_nodes), _part(received, piece, num_inside * num_nodes))
            for piece in pieces
        ]
        is_async = len(pieces) > 1
        inside = [dist.all_to_all_single(*memory[0], group=self.inside, async_op=is_async)]
        across = []
        for number, (arrived, sent) in enumerate(memory):
            if number + 1 < len(memory):
                inside.append(dist.all_to_all_single(*memory[number + 1], group=self.inside, async_op=True))
            _wait(inside[number])
            numel = arrived.numel() // num_inside
            partial = _as(sent, torch.float32, numel)
            tree_sum(arrived.view(num_inside, -1), partial)
            if self.partials == "bf16":
                partial = partial.to(torch.bfloat16)
            rows = _as(arrived, partial.dtype, numel)
            work = dist.all_to_all_single(rows, partial, group=self.across, async_op=is_async)
            across.append((work, rows.view(num_nodes, -1), partial))  # `partial` lives until it is sent
        for piece, (work, rows, _) in zip(pieces, across, strict=True):
            _wait(work)
            total = output[piece]
            tree_sum(rows[:, : total.numel()], total, divide_by)

    def variants(self, dtype: torch.dtype, multiple: int) -> Iterator[Variant]:
        """Yield the variants of the kernel that `sum_over_ranks` may need: see `variants_over_ranks`."""
        partial = torch.bfloat16 if self.partials == "bf16" else torch.float32
        for length in (16, 16 // dtype.itemsize):  # of a row; pieces end at multiples of 16, rows at 16 bytes
            inside = self.across.size() * length
            yield variant(self.inside.size(), dtype, inside, inside)
            yield variant(self.across.size(), partial, length, multiple)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False) -> dist.Work | None:
        """All-gather between nodes, then inside the node.

        Args:
            output: (N x S,), contiguous. With `async_op` complete after `wait` of the returned work.
            input: (S,), contiguous; may be a part of `output`.
            async_op: whether to return while the all-gather inside the node still runs.
        """
        num_inside, num_nodes = self.inside.size(), self.across.size()
        by_node = torch.empty(num_nodes * input.numel(), dtype=input.dtype, device=input.device)
        by_place = torch.empty_like(output)
        all_gather(by_node, input, self.across, async_op=False)
        work = all_gather(by_place, by_node, self.inside, async_op=async_op)
        into = output.view(num_nodes, num_inside, -1)
        part = by_place.view(num_inside, num_nodes, -1).transpose(0, 1)
        if work is None:
            into.copy_(part)
            return None
        return _Ordered(work, into, part)


class _Ordered(dist.Work):
    """The work of an all-gather in two levels. Its `wait` copies the received chunks into the order of the ranks."""

    def __init__(self, work: dist.Work, into: torch.Tensor, part: torch.Tensor) -> None:
        super().__init__()
        self._work, self._into, self._part = work, into, part
        self._is_done = False

    def wait(self, *arguments: object) -> bool:
        """Wait for the all-gather inside the node, and copy once."""
        result = self._work.wait(*arguments)  # type: ignore[arg-type]
        if not self._is_done:
            self._into.copy_(self._part)
            self._is_done = True
        return result

    def is_completed(self) -> bool:
        """Return whether the all-gather inside the node has ended, also by an error."""
        return self._work.is_completed()


def _pieces(length: int, num_bytes: int) -> list[slice]:
    """Cut the columns of a reduction of so many bytes: see [Note: Pieces]. Pieces start at multiples of 16 elements."""
    number = max(1, min(MOST_PIECES, num_bytes // BYTES_OF_A_PIECE))
    step = -(-length // (16 * number)) * 16
    bounds = [*range(0, length, step), length] if length else [0, 0]
    return [slice(*pair) for pair in pairwise(bounds)]


def _part(memory: torch.Tensor, piece: slice, num_rows: int) -> torch.Tensor:
    """Return the part of a contiguous tensor for a piece of `num_rows` rows: pieces lie one after the other."""
    return memory[num_rows * piece.start : num_rows * piece.stop]


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _as(memory: torch.Tensor, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return the first bytes of a contiguous 1-D tensor as `numel` elements of `dtype`."""
    return memory[: -(-numel * dtype.itemsize // memory.element_size())].view(dtype)[:numel]
