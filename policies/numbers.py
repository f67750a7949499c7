"""Checks of numbers, and numbers of ranks that a launcher, such as torchrun, puts into the environment.

A bool is not a number. NaN and infinity are not finite.
"""

import math
import os
from numbers import Integral, Real
from typing import TypeGuard

from zeroamp.policies.errors import ConfigError, describe, shown

WORLD_SIZE = "WORLD_SIZE"
"""The number of ranks of the job."""
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""The number of ranks on this node."""


def is_integer(value: object, *, at_least: int) -> TypeGuard[int]:
    """Return whether `value` is an integer of at least `at_least`. NumPy's integers count, a bool does not."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= at_least


def is_finite(value: object, *, above: float = -math.inf) -> TypeGuard[float]:
    """Return whether `value` is a finite number greater than `above`. NumPy's numbers count, a bool does not."""
    if type(value) is bool or not isinstance(value, Real):
        return False
    return math.isfinite(value) and float(value) > above


def size_from_launcher(name: str) -> int | None:
    """Return the number in the environment variable `name`; None if the variable is unset or empty.

    Raises:
        ConfigError: the variable is not a whole number from 1 on.
    """
    text = os.environ.get(name, "")
    if not text:
        return None
    size = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if size < 1:
        remedy = "Launchers such as torchrun set the variable to a number of ranks. Set such a number, or unset it."
        raise ConfigError(describe(f"the environment variable {name}", shown(text), "a whole number from 1 on", remedy))
    return size
