"""Takes the loss from a model's output."""

from collections.abc import Callable
from typing import Any

import torch

from zeroamp.policies.errors import ZeroAmpError

LossFunction = Callable[[Any], torch.Tensor]


def loss_of(output: Any, loss_fn: LossFunction | None, *, where: str, error: type[ZeroAmpError]) -> torch.Tensor:
    """Return `loss_fn(output)`. Without `loss_fn`, return `output.loss`, or `output` if it has no such attribute.

    Raises:
        error: the loss is not a tensor of one element that requires a gradient. The text begins with `where`.
    """
    loss = loss_fn(output) if loss_fn is not None else getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, torch.Tensor) and not loss.requires_grad:
        found += " that needs no gradient"
    source = "the loss" if loss_fn is not None or loss is not output else "the model's output, which has no .loss,"
    raise error(
        f"{where}: the loss must be a scalar that depends on trainable parameters, but {source} is {found}. "
        "Pass loss_fn (`zeroamp plan`: --loss), which computes it, or inputs (labels) with which the model returns it."
    )
