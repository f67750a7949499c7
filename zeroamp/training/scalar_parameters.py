"""Gradients of replicated (0-D) parameters: averaged over all ranks in the step's all-reduce.

FSDP2 shards dimension 0, which a 0-D parameter does not have, so every rank holds and updates the whole parameter.
Autograd sums its gradient over the micro-batches of an optimizer step, in fp32. The mean over ranks needs no collective
of its own: the step's all-reduce has two more fp64 numbers per parameter, the gradient and whether there is one. On 2
ranks the fp64 sum, rounded to fp32, is the same as an fp32 sum.
"""

from collections.abc import Sequence

import torch
from torch import nn


class ReplicatedGradients:
    """Averages the gradients of a model's replicated parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the 0-D parameters of a wrapped model, at least one, in the order that all ranks have."""
        self._parameters = parameters

    def statistics(self, device: torch.device) -> list[torch.Tensor]:
        """Return two 1-D fp64 tensors for the step's all-reduce: gradients, and 1 or 0 for used or not."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        gradients = [zero if p.grad is None else p.grad.to(torch.float64) for p in self._parameters]
        used = torch.tensor(self._are_used(), dtype=torch.float64, device="cpu").to(device, non_blocking=True)
        return [torch.stack(gradients), used]

    def _are_used(self) -> list[bool]:
        """Return for each parameter whether this rank has a gradient."""
        return [parameter.grad is not None for parameter in self._parameters]

    @torch.no_grad()
    def set_gradients(self, statistics: torch.Tensor, divide_factor: float) -> torch.Tensor:
        """Set the gradients to the sums over ranks, divided. Return the sum of their squares, 0-D fp64.

        A parameter that any rank used gets a gradient on all ranks. A parameter that no rank used keeps None. Only a
        rank with an unused parameter waits for the device.

        Args:
            statistics: the sums over ranks of what `statistics` returned, 1-D fp64.
            divide_factor: the number of ranks, or FSDP2's gradient divide factor.
        """
        squares = statistics.new_zeros(())
        num = len(self._parameters)
        sums, num_used = statistics[:-num], statistics[-num:]
        for index, (parameter, is_used) in enumerate(zip(self._parameters, self._are_used(), strict=True)):
            if not is_used and (not parameter.requires_grad or num_used[index] == 0):
                continue
            parameter.grad = (sums[index] / divide_factor).to(parameter.dtype)  # 0-D fp32
            squares = squares + parameter.grad.double().square()
        return squares
