"""Reads the sizes that a launcher, such as torchrun, puts into the environment."""

import os

from zeroamp.policies.errors import ConfigError, describe, shown

WORLD_SIZE = "WORLD_SIZE"
"""The number of ranks of the job."""
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""The number of ranks on this node."""


def size_from_launcher(name: str) -> int | None:
    """Return the number in the environment variable `name`; None if it is not set, or empty.

    Raises:
        ConfigError: the variable is not a whole number from 1 on.
    """
    text = os.environ.get(name, "")
    if not text:
        return None
    try:
        size = int(text)
    except ValueError:  # not a number, or too long for one
        size = 0
    if size < 1:
        remedy = "torchrun and other launchers set it to a number of ranks. Set such a number, or unset the variable."
        raise ConfigError(describe(f"the environment variable {name}", shown(text), "a whole number from 1 on", remedy))
    return size
