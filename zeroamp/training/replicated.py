"""Gradients of replicated (0-D) parameters: averaged over all ranks in the step's all-reduce.

FSDP2 shards dimension 0, which a 0-D parameter does not have, so every rank holds and updates the whole parameter.
Autograd sums its gradient over the micro-batches of an optimizer step, in fp32. The mean over ranks needs no collective
of its own: the step's all-reduce has two more fp64 numbers per parameter, the gradient and whether there is one. On 2
ranks the fp64 sum, rounded to fp32, is the same as an fp32 sum.

With `zeroamp.reproducible` the all-reduce has a place for the gradient of each micro-batch of each rank. Every rank
then adds them in the order of the tree. They are divided together with all other gradients.
"""

from collections.abc import Iterable

import torch
from torch import nn

from zeroamp.hooks.collectives.tree_sum import tree_sum
from zeroamp.planning.micro_batch_order import MicroBatchOrder


class ReplicatedGradients:
    """Averages the gradients of a model's replicated parameters. Costs nothing if a model has none."""

    def __init__(self, parameters: Iterable[nn.Parameter], order: MicroBatchOrder | None = None) -> None:
        """Take all parameters of a wrapped model, in the order that all ranks have.

        `order`: the order of the micro-batches in which gradients are added. None: autograd sums them on each rank.
        """
        self._parameters = [parameter for parameter in parameters if parameter.dim() == 0]
        self._order = order
        self._taken: list[list[torch.Tensor | None]] = []  # a list per micro-batch

    def take(self) -> None:
        """With an `order`, move the gradients of this micro-batch out of `grad`. Call after each backward."""
        if self._order is None or not self._parameters:
            return
        self._taken.append([parameter.grad for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    def reset(self) -> None:
        """Discard the gradients that `take` moved."""
        self._taken.clear()

    def have_gradient(self) -> bool:
        """Return whether `take` moved a gradient since the last `reset`."""
        return any(gradient is not None for taken in self._taken for gradient in taken)

    def sharded(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of `parameters` that are not replicated."""
        return [parameter for parameter in parameters if parameter.dim() > 0] if self._parameters else parameters

    def statistics(self, device: torch.device) -> list[torch.Tensor]:
        """Return two 1-D fp64 tensors for the step's all-reduce: gradients, and 1 or 0 for used or not."""
        if not self._parameters:
            return []
        zero = torch.zeros((), dtype=torch.float64, device=device)
        if self._order is not None:
            return self._in_order(self._order, zero)
        gradients = [zero if p.grad is None else p.grad.to(torch.float64) for p in self._parameters]
        used = torch.tensor(self._are_used(), dtype=torch.float64).to(device, non_blocking=True)
        return [torch.stack(gradients), used]

    def _are_used(self) -> list[bool]:
        """Return for each parameter whether this rank has a gradient."""
        if self._order is None:
            return [parameter.grad is not None for parameter in self._parameters]
        return [any(taken[i] is not None for taken in self._taken) for i in range(len(self._parameters))]

    def _in_order(self, order: MicroBatchOrder, zero: torch.Tensor) -> list[torch.Tensor]:
        per_rank, num = len(self._taken), len(self._parameters)
        gradients = [zero] * (order.num_ranks * per_rank * num)
        for index, taken in zip(order.indices(per_rank), self._taken, strict=True):
            gradients[index * num : (index + 1) * num] = [zero if g is None else g.to(torch.float64) for g in taken]
        used = torch.tensor(self._are_used(), dtype=torch.float64).to(zero.device, non_blocking=True)
        return [torch.stack(gradients), used]

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
        if self._order is not None:
            rows = sums.float().view(-1, num)
            tree_sum(rows, sums := rows.new_empty(num))
        for index, (parameter, is_used) in enumerate(zip(self._parameters, self._are_used(), strict=True)):
            if not is_used and (not parameter.requires_grad or num_used[index] == 0):
                continue
            parameter.grad = (sums[index] / divide_factor).to(parameter.dtype)  # 0-D fp32
            squares = squares + parameter.grad.double().square()
        return squares
