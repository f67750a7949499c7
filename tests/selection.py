"""Which tests run: in which tier, and with which torch."""

import pytest

from zeroamp.hooks._torch.fsdp import has_reduction_options

needs_options = pytest.mark.skipif(not has_reduction_options(), reason="FSDP2 has these options from torch 2.13 on")


def slow_but(values, *fast):
    """Return the values as a test's parameters. All are marked slow, except those in `fast`."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def needs_bitsandbytes(storage="uint8"):
    """Skip the running test where bitsandbytes is missing, or FSDP2 cannot shard 4-bit weights of this storage."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: it quantizes the base")
    if storage == "uint8" and not has_reduction_options():
        pytest.skip("FSDP2 shards integers from torch 2.13 on; they are refused by name")
