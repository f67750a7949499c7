"""Lets an optimizer that gets DTensors step parameters that FSDP2 does not shard, too."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor


@contextmanager
def replicated_apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Move replicated parameters to param groups of their own: foreach kernels refuse a mixture with DTensors."""
    own = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in own:
            replicated = [parameter for parameter in params if not isinstance(parameter, DTensor)]
            if 0 < len(replicated) < len(params):
                optimizer.param_groups.append({**group, "params": replicated})
                group["params"] = [parameter for parameter in params if isinstance(parameter, DTensor)]
        yield
    finally:
        del optimizer.param_groups[len(own) :]
        for group, params in own:
            group["params"] = params
