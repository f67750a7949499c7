"""`StepReport`: loss, gradient norm, loss scale and learning rates of one optimizer step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Loss, gradient norm, loss scale and learning rates of one optimizer step.

    Tensors stay on the device. Reading `loss`, `grad_norm` or `lr` as numbers waits for the device.
    """

    step: int
    """Optimizer steps taken, this one included unless it was skipped."""
    loss_tensor: torch.Tensor
    """0-D fp64: the mean of the losses of all micro-batches and all ranks.

    Losses that `backward` got with `divide=False` are summed over the micro-batches and averaged over the ranks; with
    `zeroamp.reproducible` and `zeroamp.reduce` "sum", they are summed over the ranks too."""
    grad_norm_tensor: torch.Tensor
    """0-D fp32: the 2-norm of the averaged, unscaled gradient before clipping, over all trainable parameters. It is inf
    or nan if any gradient contains such a value."""
    loss_scale: float
    """The factor by which the losses of this step were multiplied. 1 except in float16."""
    skipped: bool
    """Whether the update and the scheduler step were skipped, because a gradient was not finite.

    Only in float16, and with `zeroamp.skip_nonfinite_steps` or `bf16.check_grad_overflow`."""
    num_skipped: int = 0
    """Optimizer steps skipped so far, this one included: `TrainStep.num_skipped`."""
    lr_values: tuple[float | torch.Tensor, ...] = ()
    """Learning rate of each param group in this step, a number or a tensor as in the optimizer."""

    def __str__(self) -> str:
        """Return the numbers as one line of text; waits for the device."""
        parts = [f"loss {self.loss:.4f}", f"gradient norm {self.grad_norm:.4g}"]
        parts += [f"lr {' / '.join(f'{rate:.3g}' for rate in self.lr)}"] if self.lr_values else []
        parts += [f"loss scale {self.loss_scale:,g}"] if self.loss_scale != 1 else []
        parts += [f"skipped ({self.num_skipped} so far)"] if self.skipped else []
        return f"step {self.step}: {', '.join(parts)}"

    def __repr__(self) -> str:
        """Return the numbers in one line; waits for the device."""
        return f"StepReport({self})"

    @property
    def loss(self) -> float:
        """The mean loss; waits for the device."""
        return float(self.loss_tensor)

    @property
    def grad_norm(self) -> float:
        """The gradient norm; waits for the device."""
        return float(self.grad_norm_tensor)

    @property
    def lr(self) -> tuple[float, ...]:
        """The learning rate of each param group. Waits for the device if the rates are tensors."""
        return tuple(float(value) for value in self.lr_values)
