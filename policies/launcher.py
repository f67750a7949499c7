"""Reads the sizes that a launcher, such as torchrun, puts into the environment."""

import os

from zeroamp.policies.errors import ConfigError, describe, shown

WORLD_SIZE = "WORLD_SIZE"
"""The number of ranks of the job."""
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""The number of ranks on this node."""


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
