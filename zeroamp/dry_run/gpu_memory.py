"""The memory of GPUs, and the largest batch that fits into it."""

from collections.abc import Callable, Mapping
from math import floor, sqrt

from zeroamp.policies.errors import ConfigError
from zeroamp.policies.numbers import is_finite

GPUS_GB = {"a100-40gb": 40, "a100": 80, "h100": 80, "h200": 141, "b200": 180, "mi300x": 192, "l40s": 48}
"""Name of a GPU -> its memory in 10^9 bytes, by the vendor's data sheet. Devices report more: an "80 GB" one has
79 GiB, which is 85 x 10^9 bytes."""
RESERVED_BYTES = 4_500_000_000
"""Memory of every GPU that a step may not take, because the driver's context and NCCL do. It is an assumption: a user
measured 4.34 GB of both on 8 x H100, with all-to-alls (https://github.com/NVIDIA/nccl/issues/1685)."""
MAX_BATCH = 2**20


def memory_of(gpu: str | float) -> int:
    """Return the memory of a GPU in bytes. `gpu` is a name in `GPUS_GB`, or the memory in 10^9 bytes.

    Raises:
        ConfigError: there is no such name, or the number is not positive.
    """
    gigabytes = GPUS_GB.get(gpu) if isinstance(gpu, str) else gpu
    if not is_finite(gigabytes, above=0):
        raise ConfigError(
            f"gpu must be one of {', '.join(GPUS_GB)}, or the memory of another GPU in GB (10^9 bytes), but is {gpu!r}."
        )
    return int(gigabytes * 1e9)


def usable_bytes(gpu_bytes: int) -> int:
    """Return the bytes of a GPU's memory that a step may take. A stage fits if its peak is no larger."""
    return gpu_bytes - RESERVED_BYTES


def largest_batch(peak_bytes: Callable[[int], int], limit: int) -> int:
    """Return the largest batch whose peak is at most `limit` bytes; 0 if not even 1 fits, at most `MAX_BATCH`.

    A peak is the largest of many sums. Each is affine in the batch, or quadratic if the loss is of all pairs of
    samples. So `_solved` guesses from the known peaks, until a batch fits and the next larger one does not. From the
    fourth guess on that does not halve the interval, the batch in the middle is tried next.
    """
    peaks: dict[int, int] = {}
    fits, fails = 0, MAX_BATCH + 1
    guess, num_slow = 1, 0
    while (width := fails - fits) > 1:
        peaks[guess] = peak_bytes(guess)
        if peaks[guess] <= limit:
            fits = guess
        else:
            fails = guess
        guess = min(max(_solved(peaks, limit), fits + 1), fails - 1)
        if fails in peaks and fails - fits > width // 2:
            num_slow += 1
            if num_slow > 3:
                guess = (fits + fails) // 2
    return fits


def _solved(peaks: Mapping[int, int], limit: int) -> int:
    """Return where the parabola through the three known peaks nearest to the limit reaches it; with two, the line.

    `peaks` is batch -> bytes. Peaks do not fall, so a parabola that opens downwards is noise: the line is taken then.
    """
    if len(peaks) == 1:
        return 2
    first, second, *third = sorted(peaks, key=lambda batch: abs(peaks[batch] - limit))[:3]
    slope, curvature = (peaks[second] - peaks[first]) / (second - first), 0.0
    for batch in third:
        curvature = max(0.0, ((peaks[batch] - peaks[first]) / (batch - first) - slope) / (batch - second))
    # With d = batch - second: curvature * d^2 + linear * d = rest.
    linear, rest = slope + curvature * (second - first), limit - peaks[second]
    root = linear**2 + 4 * curvature * rest
    if root < 0 or linear + sqrt(root) <= 0:
        return MAX_BATCH
    return second + floor(2 * rest / (linear + sqrt(root)))
