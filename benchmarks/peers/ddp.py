"""DistributedDataParallel with torch.autocast: fp32 gradients, reduced with the last micro-batch; or not at all.

Without communication each rank trains alone. What is left is compute and an update of all parameters, of which a
sharded engine updates its part.
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.engine import Engine, Setup, UnavailableError, mean


def build(setup: Setup, *, communicates: bool = True) -> Engine:
    """Replicate a model.

    Raises:
        UnavailableError: the process group is a fake one, whose all-reduce has no result for DDP to read.
    """
    if communicates and setup.options.fake:
        raise UnavailableError("not with a fake process group")
    model: nn.Module = setup.model()
    if communicates:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = setup.optimizer(model)
    last = len(setup.micro_batches) - 1

    def step() -> torch.Tensor:
        losses = []
        for index, tokens in enumerate(setup.micro_batches):
            with nullcontext() if index == last or not communicates else model.no_sync():
                with setup.autocast():
                    losses.append(model(tokens))
                (losses[-1] / (last + 1)).backward()
        if setup.options.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setup.options.clip)
        optimizer.step()
        optimizer.zero_grad()
        return mean(losses)

    return Engine(step=step)


ENGINES = {"DDP autocast": build, "no communication": partial(build, communicates=False)}
