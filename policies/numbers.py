"""Which values count as numbers: a bool is none, and NaN and infinity are not finite."""

import math
from typing import TypeGuard


def is_integer(value: object, *, at_least: int) -> TypeGuard[int]:
    """Return whether `value` is an int (no bool) of `at_least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_finite(value: object, *, above: float = -math.inf) -> TypeGuard[float]:
    """Return whether `value` is a finite int or float (no bool) greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > above
