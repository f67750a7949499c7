"""Computes loss and gradient norm with the same bits on any number of ranks, for `zeroamp.reproducible`."""

from collections.abc import Sequence

import torch

from zeroamp.hooks.collectives.exact_sum import ExactSum, total_of
from zeroamp.planning.mesh import device_of
from zeroamp.training.losses import LossSum
from zeroamp.training.micro_batches import MicroBatches
from zeroamp.training.norm import by_device, local_gradients
from zeroamp.wrapping.state import WrapState


class ExactStatistics:
    """Sums losses and squared gradients exactly, in any order, over the ranks: see `hooks/collectives/exact_sum.py`."""

    def __init__(self, state: WrapState, micro_batches: MicroBatches) -> None:
        self._state = state
        self._micro_batches = micro_batches

    def local(self, losses: Sequence[LossSum]) -> torch.Tensor:
        """Return this rank's part of the two sums, 1-D fp64. Only the first replica counts squares of gradients."""
        mesh = self._state.mesh
        device = device_of(mesh)
        of_losses, of_squares = ExactSum(device), ExactSum(device, squares=True)
        of_losses.add(loss.terms for loss in losses)
        if mesh.ndim == 1 or mesh.get_local_rank(0) == 0:
            gradients = self._micro_batches.replicated.sharded(self._micro_batches.with_gradient())
            for tensors in by_device(local_gradients(gradients)).values():
                of_squares.add(tensors)
        return torch.cat([of_losses.numbers(), of_squares.numbers()])

    def totals(self, summed: torch.Tensor, losses: Sequence[LossSum]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the sum of squared gradients, 0-D fp64 each, from the sums over ranks of `local`.

        The loss is the mean over all micro-batches. Losses that `backward` did not divide are summed over the
        micro-batches, and averaged over the ranks (with `zeroamp.reduce` "sum", summed over the ranks).
        """
        of_losses, of_squares = summed.tensor_split(2)
        is_sum = not losses[0].is_divided and self._state.plan.policy.reduce == "sum"
        num_ranks = 1 if is_sum else self._state.mesh.size()
        return total_of(of_losses) / (losses[0].divisor * num_ranks), total_of(of_squares)
