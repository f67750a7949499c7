"""Which tests run: in which tier, and with which torch."""

import pytest

from zeroamp.hooks._torch.fsdp import has_reduction_options

needs_options = pytest.mark.skipif(not has_reduction_options(), reason="FSDP2 has these options from torch 2.13 on")


def slow_but(values, *fast):
    """Return the values as a test's parameters. All are marked slow, except those in `fast`."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
