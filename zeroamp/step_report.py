"""`StepReport`: what one optimizer step did."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One optimizer step. Values stay on the device until they are read."""

    step: int
    """Optimizer steps taken, this one included unless it was skipped."""
    loss_tensor: torch.Tensor
    """0-D fp64: the mean of the losses of all micro-batches and all ranks."""
    grad_norm_tensor: torch.Tensor
    """0-D fp32: the 2-norm of the averaged, unscaled gradient before clipping, over all trainable parameters. inf or
    nan where a gradient is."""
    loss_scale: float
    """What the losses of this step were multiplied by; 1 but for float16."""
    skipped: bool
    """Whether a gradient overflowed float16: no update, no scheduler step. Other modes skip nothing."""

    @property
    def loss(self) -> float:
        """The mean loss; waits for the device."""
        return float(self.loss_tensor)

    @property
    def grad_norm(self) -> float:
        """The gradient norm; waits for the device."""
        return float(self.grad_norm_tensor)
