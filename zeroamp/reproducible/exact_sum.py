"""A sum whose bits depend neither on the order and grouping of its terms nor on the number of ranks.

[Note: Sums of slices]
The terms are fp64 numbers. Each is cut into slices of 32 bits, at fixed powers of two:

    x = sum over l of s_l 2^(32 l - 298),   s_l an integer, |s_l| < 2^32

The slices of one place l are integers, and sums of integers have one value in any order, if no sum is rounded. A sum of
up to 2^21 slices is below 2^53, so fp64 holds it exactly. It is split into multiples of 2^26 and a rest. Both parts are
added over all blocks and, in the step's all-reduce, over all ranks: exactly again, up to 2^43 terms. Then every rank
adds the places from the highest to the lowest.

Only three places count: the highest place of any term, and the two below it. Lower slices are cut off. A block cuts off
what is below the three highest places of its own terms. The highest place of all terms is as high or higher, so no
block has cut off a slice that counts. At least the 65 bits from the leading bit of the largest term on are summed. n
terms lose less than n 2^-64 of the largest one: 2^-31 for 2^33 terms.

This is the pre-rounded sum with fixed bins of Demmel and Nguyen ("Parallel Reproducible Summation", IEEE Transactions
on Computers 64, 2015) and of Ahrens, Demmel and Nguyen ("Algorithms for Efficient Reproducible Floating Point
Summation", ACM Transactions on Mathematical Software 46, 2020), with bins of integers that are cut off, not rounded.

The range is that of squares of fp32 numbers: 2^-298 to 2^256. If a term is inf or nan, the sum is nan.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch

_WIDTH = 32  # bits of a slice
_LOWEST = -298  # 2^-298 is the square of the smallest fp32 number
_NUM_PLACES = -(-(256 - _LOWEST + 1) // _WIDTH)  # 18
_NUM_KEPT = 3
_SPLIT = 2.0**26
NUM_NUMBERS = 3 * _NUM_PLACES
"""The number of fp64 numbers in which a rank sends its part of a sum."""
_BLOCK = {"cpu": 2**16}  # terms that are cut at a time: 512 KiB in fp64, so that they stay in a core's cache
_LARGEST_BLOCK = 2**21  # larger ones would not be summed exactly; on a GPU, the work on one of 16 MiB outlasts a launch
_SHARE = 4  # a tensor of at most this part of a block shares one
_SMALLEST_POWER = -320


@cache
def _powers_of_two(device: torch.device) -> torch.Tensor:
    """Return 2^-320 to 2^320, exactly: fp64."""
    powers = [2.0**power for power in range(_SMALLEST_POWER, -_SMALLEST_POWER + 1)]
    return torch.tensor(powers, dtype=torch.float64, device="cpu").to(device, non_blocking=True)


class ExactSum:
    """This rank's part of a sum of fp32 numbers, or of their squares: see [Note: Sums of slices].

    No method waits for the device.
    """

    def __init__(self, device: torch.device, *, squares: bool = False) -> None:
        """Start with a sum of no terms on `device`. With `squares`, the terms are the squares of the numbers."""
        self._device = device
        self._squares = squares
        self._numbers = torch.zeros(3, _NUM_PLACES, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add the elements of fp32 tensors of any shape, all on one device."""
        blocks = list(_blocks_of(tensors))
        if blocks:
            self._add(blocks)

    def _add(self, blocks: Sequence[torch.Tensor]) -> None:
        largest = torch.stack([block.abs().amax() for block in blocks]).double()
        # The highest place of a block follows from the exponent of its largest term.
        exponent = torch.frexp(largest.square() if self._squares else largest).exponent
        highest = (exponent - 1 - _LOWEST).div(_WIDTH, rounding_mode="floor").where(largest > 0, 0)
        highest = highest.clamp(_NUM_KEPT - 1, _NUM_PLACES - 1)
        # Shifts the lowest bit of the highest place to 1. The factor is exact, also that of numbers to be squared.
        shift = -(_LOWEST + _WIDTH * highest)
        factors = _powers_of_two(largest.device)[(shift // 2 if self._squares else shift) - _SMALLEST_POWER]
        # On a CPU a new tensor of a block's size costs more time than an operation on it.
        work = torch.empty(2, max(map(len, blocks)), dtype=torch.float64, device=largest.device)
        cut = [self._cut(block, factor, work) for block, factor in zip(blocks, factors.unbind(), strict=True)]
        sums = torch.stack(cut)  # (blocks, 3)
        multiples = (sums / _SPLIT).floor()
        rests = sums - multiples * _SPLIT
        not_finite = largest - largest  # 0, or nan
        places = (highest[:, None] - torch.arange(_NUM_KEPT, device=highest.device)).reshape(-1)
        device = self._device
        for row, values in ((0, multiples), (1, rests)):
            values = (values + not_finite[:, None]).reshape(-1)
            self._numbers[row].index_add_(0, places.to(device), values.to(device))
        self._numbers[2].index_add_(0, highest.to(device), torch.ones_like(largest).to(device))

    def _cut(self, block: torch.Tensor, factor: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
        """Return the sums of the slices of the highest place of a block, and of the two places below: (3,), fp64.

        `work`: (2, at least the block's size), fp64. Overwritten.
        """
        rest, whole = (row[: len(block)] for row in work.unbind())
        rest.copy_(block).mul_(factor)
        if self._squares:
            rest.square_()
        sums = []
        for place in range(_NUM_KEPT):
            sums.append(torch.trunc(rest, out=whole).sum())
            if place + 1 < _NUM_KEPT:
                rest.sub_(whole).mul_(2.0**_WIDTH)  # both exact
        return torch.stack(sums)

    def numbers(self) -> torch.Tensor:
        """Return the numbers to sum over ranks, for `total_of`: (`NUM_NUMBERS`,), fp64."""
        return self._numbers.reshape(-1)


@torch.no_grad()
def total_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of the terms of all ranks: 0-D fp64. nan if a term is not finite.

    Args:
        numbers: the results of `ExactSum.numbers`, summed over the ranks in any order.
    """
    multiples, rests, num_blocks = numbers.tensor_split(3)
    carry = (rests / _SPLIT).floor()
    multiples, rests = multiples + carry, rests - carry * _SPLIT  # now as if the terms were one block
    places = torch.arange(_NUM_PLACES, device=numbers.device)
    highest = torch.where(num_blocks > 0, places, -1).amax()
    units = _powers_of_two(numbers.device)[_LOWEST + _WIDTH * places - _SMALLEST_POWER]
    counts = (places <= highest) & (places > highest - _NUM_KEPT)
    parts = torch.where(counts, (multiples * _SPLIT + rests) * units, 0.0)
    total = numbers.new_zeros(())
    for part in reversed(parts.unbind()):
        total = total + part
    return total + (multiples.sum() - multiples.sum())  # nan, if a term was


def _blocks_of(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield all elements as 1-D blocks. Small tensors are joined to one block, because each costs a dozen ops."""
    small: list[torch.Tensor] = []
    num_small = 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        size = _block_size(flat.device.type)
        if flat.numel() > size // _SHARE:
            yield from flat.split(size)  # type: ignore[no-untyped-call]
        elif flat.numel() > 0:
            if num_small + flat.numel() > size:
                yield torch.cat(small)
                small, num_small = [], 0
            small.append(flat)
            num_small += flat.numel()
    if small:
        yield torch.cat(small)


def _block_size(device_type: str) -> int:
    return _BLOCK.get(device_type, _LARGEST_BLOCK)
