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

from tests.oracles import plain_loop


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

    def adamw(parameters):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr, weight_decay=0.1)

    losses, _, parameters, _ = plain_loop.train(family, num_steps=num_steps, num_micro=1, make_optimizer=adamw)
    return Expected(losses=[[loss for (loss,) in of_rank] for of_rank in losses], parameters=parameters)
