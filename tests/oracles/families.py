"""The oracle of a family: one process, plain torch, the ranks one after the other. Imports nothing of zeroamp.

A parameter that no rank used has no gradient, so AdamW leaves it alone: no weight decay, no momentum. One that some
ranks used has zeros from the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from tests.models.families import NUM_RANKS, loss_of


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a training computes."""

    losses: list[list[float]]
    """[rank][step]."""
    parameters: dict[str, torch.Tensor]
    """FQN -> the parameter at the end, fp32."""


@contextmanager
def grouped_products_in(dtype: torch.dtype) -> Iterator[None]:
    """Let `F.grouped_mm`, which transformers calls, cast what it multiplies, as autocast casts for its own ops."""
    plain = F.grouped_mm

    def low(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        return plain(a.to(dtype), b.to(dtype), **options)

    F.grouped_mm = low
    try:
        yield
    finally:
        F.grouped_mm = plain


def train(family, *, num_steps, lr):
    """Train under plain bf16 autocast with AdamW; gradients are averaged in fp32 in the order of the ranks."""
    model = family.seeded()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)
    losses = [[] for _ in range(NUM_RANKS)]
    for step in range(num_steps):
        of_ranks = []
        for rank in range(NUM_RANKS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, family.batch(step * NUM_RANKS + rank))
            losses[rank].append(float(loss.detach()))
            of_ranks.append(torch.autograd.grad(loss.float(), parameters, allow_unused=True))
        for parameter, *gradients in zip(parameters, *of_ranks, strict=True):
            parameter.grad = _average(gradients)
        optimizer.step()
    return Expected(losses=losses, parameters={fqn: p.detach().clone() for fqn, p in model.named_parameters()})


def _average(gradients):
    """The mean over the ranks, None if none has a gradient."""
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient.clone() if total is None else total + gradient
    return None if total is None else total / len(gradients)
