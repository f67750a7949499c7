"""The true global gradient norm, and clipping by it."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of `parameter.grad`."""
    gradient = parameter.grad
    if gradient is None:
        raise AssertionError("expected a parameter with a gradient, got None")
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def local_sum_of_squares(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of this rank's gradient shards: 0-D, fp64.

    In fp64, because a sharded and an unsharded sum in fp32 differ in the last bit: the stages would disagree.
    """
    squares = [torch.linalg.vector_norm(local_gradient(p), dtype=torch.float64).square() for p in parameters]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), the rule of `torch.nn.utils.clip_grad_norm_`; 1 if `max_norm` is 0.

    `norm` is 0-D fp32, and so is the result. Nothing is read back to the host.
    """
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def multiply_gradients(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply all gradient shards by `factor`, 0-D fp32."""
    if parameters:
        torch._foreach_mul_([local_gradient(parameter) for parameter in parameters], factor)
