"""Loss scaling: `LossScaler` applies the scale, `policies.LossScale` computes the next one.

`torch.amp.GradScaler` has neither hysteresis nor a minimum, and its non-finite check needs a collective of its own per
device and dtype of the gradients. The check here reads the global gradient norm, which is already the same on all
ranks.
"""

import math
from collections import deque
from dataclasses import asdict
from typing import Any

import torch

from zeroamp.policies.errors import StepError, describe
from zeroamp.policies.loss_scale_rule import LossScale, LossScaleState

NUM_NORMS_KEPT = 5


class LossScaler:
    """The loss scale of one training run. If it is not enabled, losses pass through unchanged."""

    def __init__(self, config: LossScale, *, enabled: bool) -> None:
        self.config = config
        self.enabled = enabled
        self.scale = 1.0
        """The factor by which the next backward multiplies the loss. Reading it does not wait for the device."""
        self._set(config.start())
        self._norms: deque[float] = deque(maxlen=NUM_NORMS_KEPT)  # of the last steps, for the error message

    @property
    def _kind(self) -> str:
        return ("dynamic" if self.config.dynamic else "fixed") if self.enabled else "switched-off"

    def _set(self, state: LossScaleState) -> None:
        self.state = state
        self.scale = state.scale if self.enabled else 1.0

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale, in the loss's shape. A scalar loss in low precision becomes fp32."""
        return loss * torch.full((), self.scale, dtype=torch.float32, device=loss.device) if self.enabled else loss

    def overflowed(self, norm: float, num_steps: int) -> bool:
        """Update the scale after a step with this unscaled global norm. Return whether to skip the step.

        The fp64 sum of squares of finite fp32 gradients is finite. So the norm is non-finite exactly if a gradient is,
        and all ranks agree.

        Raises:
            StepError: on all ranks, if a gradient overflowed at the minimum scale.
        """
        if not self.enabled:
            return False
        overflow = not math.isfinite(norm)
        self._norms.append(norm)
        if overflow and self.config.is_exhausted(self.state):
            raise StepError(
                f"A gradient overflowed at the loss scale {self.scale:g}, which is fp16.min_loss_scale "
                f"{self.config.minimum:g}, after {num_steps} optimizer steps; the last gradient norms were "
                f"{', '.join(f'{norm:g}' for norm in self._norms)}. Lower the learning rate or fp16.min_loss_scale, "
                "look for bad batches, or train in bfloat16."
            )
        self._set(self.config.after(self.state, overflow=overflow))
        return overflow

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its counters and its kind (off, fixed or dynamic), as plain values."""
        return {"kind": self._kind, **asdict(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and its counters.

        Raises:
            StepError: the state has another kind of scale (off, fixed or dynamic) than the config, or another value of
                a fixed scale.
        """
        values = {key: value for key, value in state.items() if key != "kind"}
        if state["kind"] != self._kind or (self._kind == "fixed" and values["scale"] != self.config.initial):
            raise StepError(
                describe(
                    "loss_scale in TrainStep.load_state_dict",
                    f"of a {state['kind']} scale at {values['scale']:g}",
                    f"of a {self._kind} scale{f' at {self.scale:g}' if self._kind == 'fixed' else ''}, as in the "
                    "config",
                    'To start with the config\'s scale, leave "loss_scale" out of the state.',
                )
            )
        self._set(LossScaleState(**values))
