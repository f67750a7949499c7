"""Checks of numbers, their text, and numbers of ranks that a launcher, such as torchrun, puts into the environment.

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
_DIGITS = 3
"""Significant digits of the largest number that is shown."""


def is_integer(value: object, *, at_least: int) -> TypeGuard[int]:
    """Return whether `value` is an integer of at least `at_least`. NumPy's integers count, a bool does not."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= at_least


def is_finite(value: object, *, above: float = -math.inf) -> TypeGuard[float]:
    """Return whether `value` is a finite number greater than `above`. NumPy's numbers count, a bool does not."""
    if type(value) is bool or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value) and float(value) > above
    except OverflowError:  # an integer that no float is near to
        return False


def decimals_of(largest: float) -> int:
    """Return with how many decimals numbers up to `largest` are shown: at least 2, and 3 significant digits of it."""
    return 2 if largest == 0 else min(12, max(2, _DIGITS - 1 - math.floor(math.log10(largest))))


def float_text(value: float, decimals: int) -> str:
    """Return a finite number with so many decimals: "1,234.50", "0", or "<0.01" where it would be rounded to 0."""
    if value == 0:
        return "0"
    is_hidden = abs(value) < 0.5 * 10**-decimals
    return f"<{10**-decimals:.{decimals}f}" if is_hidden else f"{value:,.{decimals}f}"


def byte_unit(largest: float) -> tuple[str, int]:
    """Return the unit in which up to `largest` bytes are shown, and its size: B, KiB, MiB or GiB (1024³ bytes)."""
    power = next(power for power in (3, 2, 1, 0) if largest >= 1024**power or power == 0)
    return ("B", "KiB", "MiB", "GiB")[power], 1024**power


def size_text(num_bytes: float) -> str:
    """Return a number of bytes as text in its unit: "512 B", "1.50 MiB"."""
    name, size = byte_unit(num_bytes)
    scaled = num_bytes / size
    return f"{scaled:,.0f} B" if size == 1 else f"{float_text(scaled, decimals_of(scaled))} {name}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 rank", "2,048 ranks". The plural has an s, unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


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
