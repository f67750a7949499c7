"""What fits on the GPU: the largest batch, and changes with which a run that does not fit would."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from zeroamp.policies.policy import Stage

MAX_BATCH = 2**20
MAX_RANKS = 2**14
"""The largest number of ranks that is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change of a run that does not fit, and the memory of one rank with it."""

    stage: Stage
    num_ranks: int
    batch: int
    """Samples per micro-batch and rank."""
    checkpointing: bool
    """Whether each unit recomputes its forward in the backward."""
    offload: bool
    """Whether shards, gradients and optimizer state are on the CPU (`zero_optimization.offload_optimizer`)."""
    peak_bytes: int = 0
    """Peak on the GPU, without the memory of NCCL."""
    nccl_bytes: int = 0
    """GPU memory that NCCL takes in addition."""
    host_bytes: int = 0
    """Bytes in the memory of the host, for this rank."""


def find_remedies(
    run: Remedy, largest_batch: int, measured: Callable[[Remedy], Remedy], limit: int, *, can_offload: bool
) -> tuple[Remedy, ...]:
    """Return changes with which a run fits: a smaller batch; more ranks, with activation checkpointing and offload.

    Ranks are doubled until the run fits, or until the peak falls by less than 1 %. A change that needs as many ranks as
    one before it is left out.

    Args:
        run: as it is planned. It does not fit.
        largest_batch: samples that fit without another change; 0: none.
        measured: a change -> the same with its memory.
        limit: bytes of the GPU.
        can_offload: whether the config allows offload.
    """
    found = [] if largest_batch == 0 else [measured(replace(run, batch=largest_batch))]
    changes = [(run.checkpointing, run.offload), (True, run.offload)]
    if can_offload:
        changes += [(run.checkpointing, True), (True, True)]
    most = MAX_RANKS if run.stage > 0 else run.num_ranks
    for checkpointing, offload in dict.fromkeys(changes):
        num_ranks, before = run.num_ranks, math.inf
        while num_ranks <= most:
            tried = measured(replace(run, num_ranks=num_ranks, checkpointing=checkpointing, offload=offload))
            if tried.peak_bytes + tried.nccl_bytes <= limit:
                found.append(tried)
                most = num_ranks - 1
                break
            if tried.peak_bytes > 0.99 * before:
                break
            num_ranks, before = 2 * num_ranks, tried.peak_bytes
    return tuple(found)


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
