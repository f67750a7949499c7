"""What fits on the GPU: the largest batch, and changes with which a run that does not fit would."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zeroamp.policies.policy import Stage

MAX_BATCH = 2**20
MAX_RANKS = 2**14
"""The largest number of ranks that is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change with which a run that does not fit would fit, and the memory of one rank with it."""

    stage: Stage
    num_ranks: int
    checkpointing: bool
    """Whether each unit recomputes its forward in the backward."""
    offload: bool
    """Whether shards, gradients and optimizer state are on the CPU (`zero_optimization.offload_optimizer`)."""
    peak_bytes: int
    """Peak on the GPU, without the memory of NCCL."""
    nccl_bytes: int
    """GPU memory that NCCL takes in addition."""
    host_bytes: int
    """Bytes in the memory of the host, for this rank."""


def find_remedies(
    measured: Callable[[int, bool, bool], Remedy], num_ranks: int, changes: Sequence[tuple[bool, bool]], limit: int
) -> Iterator[Remedy]:
    """Yield changes with which a run fits: activation checkpointing, offload, and more ranks.

    Ranks are doubled until the run fits, or until the peak falls by less than 1 %. A change that needs as many ranks as
    one before it is left out.

    Args:
        measured: (ranks, activation checkpointing, offload) -> the change with its memory.
        num_ranks: ranks of the run.
        changes: pairs of activation checkpointing and offload, in the order in which they are tried.
        limit: bytes of the GPU.
    """
    most = MAX_RANKS
    for checkpointing, offload in changes:
        tried_ranks, before = num_ranks, math.inf
        while tried_ranks <= most:
            tried = measured(tried_ranks, checkpointing, offload)
            if tried.peak_bytes + tried.nccl_bytes <= limit:
                yield tried
                most = tried_ranks - 1
            if tried.peak_bytes > 0.99 * before:
                break
            tried_ranks, before = 2 * tried_ranks, tried.peak_bytes


def largest_batch(peak_bytes: Callable[[int], int], limit: int) -> int:
    """Return the largest batch whose peak is at most `limit` bytes; 0 if not even 1 fits, at most `MAX_BATCH`.

    A peak is the largest of many sums that are each affine in the batch. So a line through two known peaks is solved
    for the limit and the solution is tried, until a batch fits and the next larger one does not.
    """
    peaks: dict[int, int] = {}
    before, fits, fails = 0, 0, MAX_BATCH + 1
    guess = 1
    while fails - fits > 1:
        peaks[guess] = peak_bytes(guess)
        if peaks[guess] <= limit:
            before, fits = fits, guess
        else:
            fails = guess
        # Interpolate between a batch that fits and one that fails, else extrapolate from the two largest that fit.
        known = [batch for batch in (before, fits, fails) if batch in peaks][-2:]
        solved = fits + 1 if len(known) < 2 else _solve(known[0], known[1], peaks, limit)
        guess = min(max(solved, fits + 1), fails - 1)
    return fits


def _solve(low: int, high: int, peaks: dict[int, int], limit: int) -> int:
    rise = peaks[high] - peaks[low]
    return MAX_BATCH if rise <= 0 else low + (limit - peaks[low]) * (high - low) // rise
