"""The arithmetic of optimizer steps that have the same bits on any number of ranks, for `zeroamp.reproducible`."""

from collections.abc import Sequence

import torch

from zeroamp.hooks.collectives.tree_sum import tree_sum
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import StepError
from zeroamp.reproducible.checks import refuse_division
from zeroamp.reproducible.exact_sum import ExactSum, total_of
from zeroamp.reproducible.order import MicroBatchOrder, micro_batch_order
from zeroamp.reproducible.seeds import MicroBatchRandomness
from zeroamp.reproducible.tree_sums import UnshardedSums
from zeroamp.training.arithmetic import StepArithmetic
from zeroamp.training.micro_batches import MicroBatches
from zeroamp.training.norm_and_clip import by_device, local_gradients
from zeroamp.training.scalar_parameters import ReplicatedGradients
from zeroamp.wrapping.state import WrapState
from zeroamp.wrapping.step_state import LossSum


class OrderedReplicatedGradients(ReplicatedGradients):
    """Gradients of 0-D parameters, added in the order of the tree.

    The all-reduce of the step has a place for the gradient of each micro-batch of each rank. Every rank then adds them
    in the order of the tree. They are divided together with all other gradients.
    """

    def __init__(self, micro_batches: MicroBatches, order: MicroBatchOrder) -> None:
        super().__init__(micro_batches.averaged)
        self._order = order
        self._taken: list[list[torch.Tensor | None]] = []  # a list per micro-batch

    def take(self) -> None:
        """Move the gradients of this micro-batch out of `grad`. Call after each backward."""
        if not self._parameters:
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

    def statistics(self, device: torch.device) -> list[torch.Tensor]:
        """Return two 1-D fp64 tensors for the step's all-reduce: gradients by their index, and 1 or 0 for used."""
        if not self._parameters:
            return []
        zero = torch.zeros((), dtype=torch.float64, device=device)
        per_rank, num = len(self._taken), len(self._parameters)
        gradients = [zero] * (self._order.num_ranks * per_rank * num)
        for index, taken in zip(self._order.indices(per_rank), self._taken, strict=True):
            gradients[index * num : (index + 1) * num] = [zero if g is None else g.to(torch.float64) for g in taken]
        used = torch.tensor(self._are_used(), dtype=torch.float64, device="cpu").to(device, non_blocking=True)
        return [torch.stack(gradients), used]

    def _are_used(self) -> list[bool]:
        return [any(taken[i] is not None for taken in self._taken) for i in range(len(self._parameters))]

    def _added(self, sums: torch.Tensor) -> torch.Tensor:
        rows = sums.float().view(-1, len(self._parameters))
        tree_sum(rows, added := rows.new_empty(len(self._parameters)))
        return added


class ReproducibleArithmetic(StepArithmetic):
    """Adds in one order, or exactly. Divides once, at the end of the step.

    Losses and squared gradients are summed exactly, in any order: see `zeroamp/reproducible/exact_sum.py`.
    """

    retains_losses = True

    def __init__(self, state: WrapState, micro_batches: MicroBatches, unsharded: Sequence[UnshardedSums]) -> None:
        """Take the state, the micro-batches, and the sums of unsharded gradients, which are empty from stage 2 on."""
        super().__init__(state, micro_batches)
        self._policy = state.plan.policy
        self._order = micro_batch_order(self._policy, state.mesh)
        self._unsharded = unsharded
        self._replicated = OrderedReplicatedGradients(micro_batches, self._order)
        micro_batches.replicated = self._replicated
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

    def refuse_count(self, *, is_last: bool) -> None:
        """Raise if the number of micro-batches is not the config's, and the order of additions depends on it."""
        per_rank, planned = self._state.step.num_micro_batches + 1, self._policy.gradient_accumulation_steps
        if is_last and self._order.depends_on_count and per_rank != planned:
            raise StepError(
                f"An optimizer step ends after {per_rank} micro-batch(es), but gradient_accumulation_steps is "
                f"{planned}. With zeroamp.reproducible both must be the same at stages 0 and 1 and with replicas. "
                "Change one, or use stage 2 or 3 without replicas."
            )

    def refuse_reopen(self) -> None:
        """Raise if the order of additions depends on the number of micro-batches."""
        if self._order.depends_on_count:
            raise StepError(
                "TrainStep.reopen was called with zeroamp.reproducible, whose order of micro-batches depends on their "
                "number at stages 0 and 1 and with replicas. Pass is_last=False to the backwards before the last one."
            )

    def before_backward(self) -> None:
        """Set the number of the micro-batch where its gradients are summed: the order of additions depends on it."""
        number = self._state.step.num_micro_batches
        for sums in self._unsharded:
            sums.micro_batch = number
        if self._state.step.shard_accumulator is not None:
            self._state.step.shard_accumulator.micro_batch = number

    def after_backward(self) -> None:
        """Take the gradients of 0-D parameters."""
        self._replicated.take()

    def end_micro_batch(self) -> None:
        """Restore the generators of random numbers."""
        if self.randomness is not None:
            self.randomness.end()

    def reset(self) -> None:
        """Discard the sums of an optimizer step."""
        for sums in self._unsharded:
            sums.reset()

    def local(self, losses: Sequence[LossSum]) -> torch.Tensor:
        """Return this rank's part of the two sums, 1-D fp64. Only the first replica counts squares of gradients."""
        mesh = self._state.mesh
        device = device_of(mesh)
        of_losses, of_squares = ExactSum(device), ExactSum(device, squares=True)
        of_losses.add(loss.terms for loss in losses)
        if mesh.ndim == 1 or mesh.get_local_rank(0) == 0:
            gradients = self._replicated.sharded(self._micro_batches.with_gradient())
            for tensors in by_device(local_gradients(gradients)).values():
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

    def divide_factor(self) -> float:
        """Return 1: `TrainStep` divides all gradients."""
        return 1.0
