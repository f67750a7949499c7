"""Sums over the micro-batches of an optimizer step in the order of the tree.

[Note: The tree over micro-batches]
`hooks/collectives/tree_sum.py` defines the order of a sum over ranks. With `zeroamp.reproducible`, micro-batches are
summed in that order too. They come one after the other, so `TreeSum` works as a binary counter: a sum of 2^m terms is
complete after its last term, and is then added to the sum of the 2^m terms before it. For k micro-batches there are at
most 1 + log2(k) partial sums at a time.

A micro-batch may have no gradient of a parameter. Its term counts as zero, which changes no sum. So two partial sums
are added when their common subtree is lower than the one that both share with the next term. The height of the subtree
that terms i and j share is the number of bits of `i xor j`.
"""

import torch


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
        *_, (_, total) = self._partial
        del self._partial[-1]
        while self._partial:
            _, left = self._partial.pop()
            total.add_(left)
        return total

    @property
    def partial(self) -> list[torch.Tensor]:
        """The partial sums, in the order of their terms."""
        return [total for _, total in self._partial]


def _height(one: int, other: int) -> int:
    return (one ^ other).bit_length()
