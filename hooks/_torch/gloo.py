"""A gloo process group whose ranks connect when they first send to each other.

Checked on torch 2.13.0; `tests/hooks/_torch/test_private_names.py` fails when the variable has no effect.
"""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Read by torch when it makes a gloo group. The argument `lazy_init` of a gloo device does not reach `new_group`."""


def new_lazy_group(ranks: Sequence[int], timeout: timedelta, *, is_local: bool) -> dist.ProcessGroup:
    """Return a gloo group of `ranks` without connections.

    By default gloo connects each rank with all others. That takes a socket per pair of ranks, and minutes at thousands
    of ranks. With `is_local` only the members call this, otherwise all ranks of the job.
    """
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=is_local
        )
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before
    return group
