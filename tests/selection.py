"""Which tests run: in which tier, and with which torch."""

import pytest
import torch

from zeroamp.hooks._torch.fsdp import has_reduction_options

CAN_ZERO_FILL = hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params")
needs_zero_fill = pytest.mark.skipif(
    not CAN_ZERO_FILL, reason="FSDP2 reduces unused parameters as zeros from torch 2.13 on"
)
needs_options = pytest.mark.skipif(not has_reduction_options(), reason="FSDP2 has these options from torch 2.13 on")


def slow_but(values, *fast):
    """Return the values as a test's parameters. All are marked slow, except those in `fast`."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
