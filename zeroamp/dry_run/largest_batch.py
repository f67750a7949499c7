"""The largest batch that fits."""

from collections.abc import Callable

MAX_BATCH = 2**20


def largest_batch(peak_bytes: Callable[[int], int], limit: int) -> int:
    """Return the largest batch whose peak is at most `limit` bytes; 0 if not even 1 fits, at most `MAX_BATCH`.

    A peak is the largest of many sums that are each affine in the batch. A line through two known peaks is solved for
    the limit, the answer is tried, and so on, until one batch is known to fit and the next one not to.
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
        # Between what fits and what fails where both are known, else onwards from the two largest that fit.
        known = [batch for batch in (before, fits, fails) if batch in peaks][-2:]
        solved = fits + 1 if len(known) < 2 else _solve(known[0], known[1], peaks, limit)
        guess = min(max(solved, fits + 1), fails - 1)
    return fits


def _solve(low: int, high: int, peaks: dict[int, int], limit: int) -> int:
    rise = peaks[high] - peaks[low]
    return MAX_BATCH if rise <= 0 else low + (limit - peaks[low]) * (high - low) // rise
