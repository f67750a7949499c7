"""Which tests run: in which tier, and with which torch."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

SUMS_ARE_IN_FP32 = torch.__version__ >= (2, 15)
"""Whether autograd itself sums unsharded gradients in fp32 between micro-batches, those of tied weights too. One
process sums these in low precision: see docs/limits.md."""


def slow_but(values, *fast):
    """Return the values as a test's parameters. All are marked slow, except those in `fast`."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def needs_bitsandbytes(storage="uint8"):
    """Skip the running test where bitsandbytes is missing, or FSDP2 cannot shard 4-bit weights of this storage."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: it quantizes the base")
    if storage == "uint8" and not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        pytest.skip("FSDP2 shards integers from torch 2.13 on; they are refused by name")
