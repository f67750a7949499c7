"""Checks of numbers: a bool is not a number, and NaN and infinity are not finite."""

import math
from numbers import Integral, Real
from typing import TypeGuard


def is_integer(value: object, *, at_least: int) -> TypeGuard[int]:
    """Return whether `value` is an integer of at least `at_least`. NumPy's integers count, a bool does not."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= at_least


def is_finite(value: object, *, above: float = -math.inf) -> TypeGuard[float]:
    """Return whether `value` is a finite number greater than `above`. NumPy's numbers count, a bool does not."""
    if type(value) is bool or not isinstance(value, Real):
        return False
    return math.isfinite(value) and float(value) > above
