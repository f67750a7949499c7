"""`StepArithmetic`: how an optimizer step divides losses, adds micro-batches, and sums loss and norm over the ranks."""

from collections.abc import Sequence

import torch
from torch import nn

from zeroamp.hooks._torch.fsdp import divide_factors
from zeroamp.planning.mesh import device_of, num_copies, replicate_size
from zeroamp.training.gradients import Gradients
from zeroamp.training.norm_and_clip import local_sum_of_squares, squares_counted_once
from zeroamp.wrapping.state import WrapState
from zeroamp.wrapping.step_state import LossSum


class StepArithmetic:
    """The arithmetic of the optimizer steps of one `Step`. An extension may replace it by a subclass."""

    retains_losses = False
    """Whether the loss of each micro-batch is retained, instead of their sum."""

    def __init__(self, state: WrapState, gradients: Gradients) -> None:
        self._state = state
        self._gradients = gradients
        self._device = device_of(state.mesh)  # the step's collective runs here; loss and shards may be elsewhere
        self._num_ranks = state.axes.whole.size()
        self._num_replicas = replicate_size(state.mesh) if state.axes.is_plain else None
        self._num_copies: dict[nn.Parameter, int] = {}  # how many ranks hold the parameter's shard

    def loss_divisor(self, *, divide: bool, others: bool | None) -> int:
        """Return the number by which `TrainStep.backward` divides a loss.

        `divide`: the argument of `backward`. `others`: that of the optimizer step's earlier micro-batches, or None
        before the first.
        """
        del others
        return self._state.plan.policy.gradient_accumulation_steps if divide else 1

    def gradient_divisor(self, is_divided: bool | None) -> int:
        """Return the number by which the end of the step divides the gradients. `is_divided`: whether losses were."""
        del is_divided
        return 1

    def before_backward(self) -> None:
        """Prepare the backward of a micro-batch."""

    def end_micro_batch(self) -> None:
        """Restore what the forward of a micro-batch changed. Called when its backward ended or raised."""

    def local(self, losses: Sequence[LossSum]) -> torch.Tensor:
        """Return this rank's part of the mean loss and of the sum of squares, 1-D fp64 of 2 elements.

        The ranks of a tensor axis have the same loss, so the mean over all ranks is the mean over the data ranks.
        """
        device, num_ranks = self._device, self._num_ranks
        parts = [loss.terms[0].to(device, torch.float64) / (loss.divisor * num_ranks) for loss in losses]
        return torch.stack([sum(parts[1:], parts[0]), self.local_squares(self._gradients.present())])

    def local_squares(self, with_gradient: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return this rank's part of the sum of squares of these parameters' gradients, 0-D fp64.

        With replicas, several ranks hold the same shard. Each divides its squares by the number of these ranks, so that
        the sum over ranks counts the shard once. Every rank has the whole gradient of an ignored parameter.
        """
        device, num_ranks = self._device, self._num_ranks
        ignored = self._gradients.ignored
        averaged = [parameter for parameter in with_gradient if parameter not in ignored] if ignored else with_gradient
        if self._gradients.replicated is not None:
            averaged = [parameter for parameter in averaged if parameter.dim() > 0]
        if self._num_replicas is not None:  # the same for all parameters
            squares = local_sum_of_squares(averaged, device) / self._num_replicas
        else:
            squares = squares_counted_once(averaged, device, [self._copies_of(each) for each in averaged])
        if ignored:
            own = [parameter for parameter in with_gradient if parameter in ignored]
            squares = squares + local_sum_of_squares(own, device) / num_ranks
        return squares

    def totals(self, summed: torch.Tensor, losses: Sequence[LossSum]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the sum of squared gradients, 0-D fp64 each, from the sums over ranks of `local`."""
        del losses
        return summed[0], summed[1]

    def divide_factor(self) -> float:
        """Return the number by which the sums of replicated gradients over all ranks are divided."""
        axes = self._state.axes
        factors = (factor for _, factor in divide_factors(self._state.root))
        factor = next(factors, 1.0 if self._state.plan.policy.reduce == "sum" else None)
        return axes.whole.size() if factor is None else factor * axes.num_tensor

    def _copies_of(self, parameter: nn.Parameter) -> int:
        if parameter not in self._num_copies:
            self._num_copies[parameter] = num_copies(parameter, self._num_ranks)
        return self._num_copies[parameter]
