"""Computes the global gradient norm, and clips by it.

With offloading, gradient shards are on the CPU, and their sum of squares is all-reduced on the mesh's device. A
parameter without elements is not sharded, and stays on the mesh's device. So the functions here accept gradients on
several devices.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from zeroamp.hooks._torch.dtensor import local_parts


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients, as plain tensors. Each parameter must have a gradient."""
    return local_parts([parameter.grad for parameter in parameters])


@torch.no_grad()
def local_sum_of_squares(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of this rank's gradient shards: 0-D, fp64, on `device`.

    The sum is in fp64, because fp32 sums of sharded and of unsharded gradients would differ in the last bit, and so
    would the norms of the ZeRO stages.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradients in by_device(local_gradients(parameters)).values():
        norms = torch._foreach_norm(gradients, dtype=torch.float64)
        total = total + torch.stack(norms).square().sum().to(device)
    return total


def squares_counted_once(
    parameters: Sequence[nn.Parameter], device: torch.device, copies: Sequence[int]
) -> torch.Tensor:
    """Return this rank's part of the sum of squares over all ranks: 0-D fp64, on `device`.

    `copies` has for each parameter the number of ranks that have the same shard, by which its squares are divided: see
    `zeroamp.planning.mesh.num_copies`.
    """
    by_number: dict[int, list[nn.Parameter]] = {}
    for parameter, number in zip(parameters, copies, strict=True):
        by_number.setdefault(number, []).append(parameter)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number in sorted(by_number):
        total = total + local_sum_of_squares(by_number[number], device) / number
    return total


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), the rule of `torch.nn.utils.clip_grad_norm_`; 1 if `max_norm` is 0.

    `norm` is 0-D fp32, and so is the result. Nothing is read back to the host.
    """
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def multiply_gradients(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply all gradient shards by `factor`, 0-D fp32, on any device."""
    for device, gradients in by_device(local_gradients(parameters)).items():
        torch._foreach_mul_(gradients, factor.to(device))


def by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    """Return the tensors grouped by device, each group in the order of `tensors`."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
