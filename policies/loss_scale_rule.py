"""Loss scaling for float16: the settings of the config, and the state of the scale from step to step.

The rules and defaults are DeepSpeed's (0.19.8): `initial_scale_power`, `loss_scale_window`, `hysteresis`,
`consecutive_hysteresis`, `min_loss_scale`. With a `loss_scale` other than 0 the scale is fixed.
"""

from dataclasses import dataclass, replace

import torch

BACKOFF = 0.5
GROWTH = 2.0
LARGEST = torch.finfo(torch.float32).max  # losses are multiplied by the scale in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The settings of loss scaling: the first scale, and the rules by which the scale changes."""

    initial: float = 65536.0
    """The scale of the first step."""
    dynamic: bool = True
    """Whether the scale changes. With a fixed scale, steps that overflow are skipped too."""
    window: int = 1000
    """Steps without overflow after which the scale doubles. They are counted from the step after the last overflow."""
    hysteresis: int = 2
    """Overflows that are needed to halve the scale. The first hysteresis - 1 overflows only decrease the counter."""
    consecutive_hysteresis: bool = False
    """True: any step without overflow resets the counter. False: only a doubling resets it."""
    minimum: float = 1.0
    """The smallest scale. An overflow at this scale is an error."""

    def start(self) -> "LossScaleState":
        """Return the state before the first step."""
        return LossScaleState(scale=self.initial, hysteresis_left=self.hysteresis)

    def is_exhausted(self, state: "LossScaleState") -> bool:
        """Return whether an overflow in `state` would be an error: the scale is the smallest, and the counter is 1."""
        return self.dynamic and state.hysteresis_left == 1 and state.scale <= self.minimum

    def after(self, state: "LossScaleState", *, overflow: bool) -> "LossScaleState":
        """Return the state after one optimizer step.

        on overflow:
            counter at 1: scale = max(scale / 2, minimum); else: counter -= 1
        on a good step:
            if consecutive: counter = hysteresis
            stable = steps since the last overflow, this one not counted
            if stable > 0 and stable is a multiple of the window: counter = hysteresis
                if scale * 2 is finite in fp32, as for torch's GradScaler: scale *= 2
        """
        step = state.num_steps
        moved = replace(state, num_steps=step + 1)
        if not self.dynamic:
            return moved
        if overflow:
            moved = replace(moved, last_overflow=step)
            if state.hysteresis_left > 1:
                return replace(moved, hysteresis_left=state.hysteresis_left - 1)
            return replace(moved, scale=max(state.scale * BACKOFF, self.minimum))
        if self.consecutive_hysteresis:
            moved = replace(moved, hysteresis_left=self.hysteresis)
        stable = step - state.last_overflow - 1
        if stable > 0 and stable % self.window == 0:
            scale = state.scale * GROWTH if state.scale * GROWTH <= LARGEST else state.scale
            return replace(moved, scale=scale, hysteresis_left=self.hysteresis)
        return moved


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleState:
    """The scale before a step, and the counters that decide its next change."""

    scale: float
    hysteresis_left: int
    """Overflows that are left until the scale is halved: the counter of `LossScale.after`."""
    num_steps: int = 0
    """Steps so far, skipped steps included."""
    last_overflow: int = -1
    """Number of the last step that overflowed, from 0 on; -1 for none."""


NO_LOSS_SCALE = LossScale(initial=1.0, dynamic=False)
"""The settings without float16: the loss is not scaled."""
