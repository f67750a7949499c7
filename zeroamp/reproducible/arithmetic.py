"""The arithmetic of optimizer steps that have the same bits on any number of ranks, for `zeroamp.reproducible`."""

from collections.abc import Sequence

import torch

from zeroamp.planning.mesh import device_of
from zeroamp.reproducible.checks import refuse_division
from zeroamp.reproducible.exact_sum import ExactSum, total_of
from zeroamp.reproducible.seeds import MicroBatchRandomness
from zeroamp.training.arithmetic import StepArithmetic
from zeroamp.training.gradients import Gradients
from zeroamp.training.norm_and_clip import by_device, local_gradients
from zeroamp.wrapping.state import WrapState
from zeroamp.wrapping.step_state import LossSum


class ReproducibleArithmetic(StepArithmetic):
    """Adds in one order, or exactly. Divides once, at the end of the step.

    Losses and squared gradients are summed exactly, in any order: see `zeroamp/reproducible/exact_sum.py`.
    """

    retains_losses = True

    def __init__(self, state: WrapState, gradients: Gradients) -> None:
        super().__init__(state, gradients)
        self._policy = state.plan.policy
        self.randomness: MicroBatchRandomness | None = None
        """Seeds the generators for each micro-batch. None outside of a `TrainStep`."""

    def loss_divisor(self, *, divide: bool, others: bool | None) -> int:
        """Return 1: the gradients are divided, at the end of the step."""
        refuse_division(self._policy, divide=divide, others=others)
        return 1

    def gradient_divisor(self, is_divided: bool | None) -> int:
        """Return the number of micro-batches of all ranks; of one rank each if losses are not divided.

        Gradients are divided only once, at the end, so that low-precision gradients and partial sums have the same bits
        on any number of ranks.
        """
        num_ranks = self._state.mesh.size() if self._policy.reduce == "mean" else 1
        return num_ranks * (self._policy.gradient_accumulation_steps if is_divided else 1)

    def before_backward(self) -> None:
        """Set the number of the micro-batch where its gradients are summed: the order of additions depends on it."""
        if self._state.step.shard_accumulator is not None:
            self._state.step.shard_accumulator.micro_batch = self._state.step.num_micro_batches

    def end_micro_batch(self) -> None:
        """Restore the generators of random numbers."""
        if self.randomness is not None:
            self.randomness.end()

    def local(self, losses: Sequence[LossSum]) -> torch.Tensor:
        """Return this rank's part of the two sums, 1-D fp64."""
        device = device_of(self._state.mesh)
        of_losses, of_squares = ExactSum(device), ExactSum(device, squares=True)
        of_losses.add(loss.terms for loss in losses)
        for tensors in by_device(local_gradients(self._gradients.present())).values():
            of_squares.add(tensors)
        return torch.cat([of_losses.numbers(), of_squares.numbers()])

    def totals(self, summed: torch.Tensor, losses: Sequence[LossSum]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the sum of squared gradients, 0-D fp64 each, from the sums over ranks of `local`.

        The loss is the mean over all micro-batches. Losses that `backward` did not divide are summed over the
        micro-batches, and averaged over the ranks (with `zeroamp.reduce` "sum", summed over the ranks).
        """
        of_losses, of_squares = summed.tensor_split(2)
        is_sum = not losses[0].is_divided and self._policy.reduce == "sum"
        num_ranks = 1 if is_sum else self._state.mesh.size()
        return total_of(of_losses) / (losses[0].divisor * num_ranks), total_of(of_squares)
