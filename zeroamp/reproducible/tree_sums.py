"""Sums over the micro-batches of an optimizer step in the order of the tree, of shards and of unsharded gradients.

[Note: The tree over micro-batches]
`hooks/collectives/tree_sum.py` defines the order of a sum over ranks. With `zeroamp.reproducible`, micro-batches are
summed in that order too. They come one after the other, so `TreeSum` works as a binary counter: a sum of 2^m terms is
complete after its last term, and is then added to the sum of the 2^m terms before it. For k micro-batches there are at
most 1 + log2(k) partial sums at a time.

A micro-batch may have no gradient of a parameter. Its term counts as zero, which changes no sum. So two partial sums
are added when their common subtree is lower than the one that both share with the next term. The height of the subtree
that terms i and j share is the number of bits of `i xor j`.

[Note: Unsharded sums in the order of the tree]
At stages 0 and 1, FSDP2 adds the unsharded gradients of the micro-batches one after the other. `UnshardedSums` moves
the gradients of each micro-batch into a `TreeSum` when the group's backward has ended. The partial sums are added to
the last micro-batch's gradients before the group is reduced. All sums are in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroamp.accumulation.shard_accumulator import ShardAccumulator
from zeroamp.hooks.group_gradients import GroupGradients
from zeroamp.hooks.tensors import hold_for_current_stream


class TreeSum:
    """The sum in the order of the tree, fp32: see [Note: The tree over micro-batches]."""

    def __init__(self) -> None:
        self._partial: list[tuple[int, torch.Tensor]] = []  # (number of a term in it, sum), in the order of the terms

    def add(self, number: int, term: torch.Tensor) -> None:
        """Add the term of micro-batch `number`. Numbers must not decrease from call to call."""
        self._add_lower_than(number)
        self._partial.append((number, term))
        self._add_lower_than(number + 1)

    def _add_lower_than(self, following: int) -> None:
        """Add neighbours whose common subtree is lower than the one that the last of them shares with `following`."""
        sums = self._partial
        while len(sums) > 1 and _height(sums[-2][0], sums[-1][0]) < _height(sums[-1][0], following):
            _, right = sums.pop()
            sums[-1][1].add_(right)

    def first(self) -> torch.Tensor:  # noqa: D102
        return self._partial[0][1]

    def total(self) -> torch.Tensor:  # noqa: D102
        *_, (number, total) = self._partial
        del self._partial[-1]
        self.add_to(total, number)
        return total

    def add_to(self, term: torch.Tensor, number: int) -> None:
        """Add all partial sums in place to `term`, the gradient of the last micro-batch `number`, and release them."""
        self._add_lower_than(number)
        while self._partial:
            _, left = self._partial.pop()
            term.add_(left.to(term.device, non_blocking=True))

    @property
    def partial(self) -> list[torch.Tensor]:
        """The partial sums, in the order of their terms."""
        return [total for _, total in self._partial]


def _height(one: int, other: int) -> int:
    return (one ^ other).bit_length()


def take_shard_sum(sums: ShardAccumulator, parameter: nn.Parameter) -> Callable[[torch.Tensor], None] | None:
    """Remove the sum of a parameter's shards of earlier micro-batches, and return a function that adds it in place.

    The function takes the shard of the last micro-batch. None if there is no such sum.
    """
    total = sums.take_sum(parameter)
    if total is None:
        return None
    if not isinstance(total, TreeSum):
        raise AssertionError(f"expected a sum in the order of the tree, got a {type(total).__name__}")

    def add_to(shard: torch.Tensor) -> None:
        for each in total.partial:
            hold_for_current_stream(each)
        total.add_to(shard, sums.micro_batch)

    return add_to


class UnshardedSums:
    """Sums the unsharded gradients of one group: see [Note: Unsharded sums in the order of the tree]."""

    def __init__(self, gradients: GroupGradients) -> None:
        self.micro_batch = 0
        """The number of the micro-batch whose backward runs. Set before each backward."""
        self._gradients = gradients
        self._group = gradients.group
        self._sums: dict[int, TreeSum] = {}  # position -> sum of the micro-batches so far
        gradients.around_reduction(self._around)

    def reset(self) -> None:
        """Release all partial sums."""
        self._sums.clear()

    def _around(self, post_backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*unused: Any) -> Any:
            if self._group.reduces:
                self._add()
            result = post_backward(*unused)
            if not self._group.reduces:
                self._take()
            return result

        return run

    def _take(self) -> None:
        """Move the unsharded gradients of this micro-batch into the sums."""
        for index, parameter in enumerate(self._group.parameters):
            if parameter.has_gradient:
                gradient = parameter.take_gradient().float()
                self._sums.setdefault(index, TreeSum()).add(self.micro_batch, gradient)

    def _add(self) -> None:
        """Add the sums to the gradients of the last micro-batch, and cast all to fp32: FSDP2 reduces one dtype."""
        for index, parameter in enumerate(self._group.parameters if self._sums else ()):
            total = self._sums.get(index)
            if parameter.has_gradient:
                gradient = parameter.take_gradient().float()
                if total is not None:
                    total.add_to(gradient, self.micro_batch)
            elif total is not None:
                gradient = total.total()
            else:
                continue
            parameter.set_sum(gradient)
        self._sums.clear()
        self._gradients.note_reduced()
