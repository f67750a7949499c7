"""Learning rates as pure functions of the optimizer step, for one param group. The curves are DeepSpeed's (0.19.8).

Steps are numbered k = 0, 1, 2, … DeepSpeed advances a scheduler after each step, and counts from the first advance:
its iteration is k - 1. Step 0 has the values that DeepSpeed's constructors set. Formulas have DeepSpeed's order of
operations, so that the results are the same bits.

[Note: first steps]
In a warm-up, steps 0 and 1 have the same learning rate: that of iteration 0. The exception is WarmupCosineLR, which is
0 at step 0 with any warmup_min_ratio.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

WarmupType = Literal["log", "linear"]


class Curve(Protocol):
    """A learning rate as a function of the step."""

    def lr(self, step: int, initial_lr: float) -> float:
        """Return the learning rate of `step` (from 0 on). `initial_lr` is the one that the optimizer was built with."""


def _warmup(iteration: int, num_steps: int, kind: WarmupType) -> float:
    """Return the progress of the warm-up at an iteration below `num_steps`: from 0 to 1 (log), to below 1 (linear)."""
    if kind == "linear":
        return iteration / num_steps
    return (1.0 / math.log(num_steps)) * math.log(iteration + 1)


def _num_warmup_steps(asked: int) -> int:
    return max(2, asked)  # the formula divides by the logarithm, which is 0 for 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupLR:
    """Rises from `warmup_min_lr` to `warmup_max_lr` (None: the initial learning rate), then stays constant."""

    warmup_min_lr: float
    warmup_max_lr: float | None
    warmup_num_steps: int
    warmup_type: WarmupType

    def lr(self, step: int, initial_lr: float) -> float:
        """Return min + (max - min) * gamma, where gamma rises from 0 to 1 in the warm-up."""
        num_steps, iteration = _num_warmup_steps(self.warmup_num_steps), max(0, step - 1)
        top = initial_lr if self.warmup_max_lr is None else self.warmup_max_lr
        gamma = _warmup(iteration, num_steps, self.warmup_type) if iteration < num_steps else 1.0
        return self.warmup_min_lr + (top - self.warmup_min_lr) * gamma


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupDecayLR:
    """Rises from `warmup_min_lr` to `warmup_max_lr`, then falls linearly back to it at `total_num_steps`."""

    total_num_steps: int
    warmup_min_lr: float
    warmup_max_lr: float
    warmup_num_steps: int
    warmup_type: WarmupType

    def lr(self, step: int, initial_lr: float) -> float:  # noqa: ARG002  # the initial learning rate is not used
        """Return min + (max - min) * gamma, where gamma rises from 0 to 1 and falls back to 0."""
        num_steps, iteration = _num_warmup_steps(self.warmup_num_steps), max(0, step - 1)
        if iteration < num_steps:
            gamma = _warmup(iteration, num_steps, self.warmup_type)
        else:
            gamma = max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - num_steps))
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * gamma


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosineLR:
    """Rises from `warmup_min_ratio` to 1 times the initial rate, then falls by half a cosine to `cos_min_ratio`."""

    total_num_steps: int
    warmup_min_ratio: float
    warmup_num_steps: int
    cos_min_ratio: float
    warmup_type: WarmupType

    def lr(self, step: int, initial_lr: float) -> float:
        """Return the initial learning rate times the ratio; 0 at step 0 ([Note: first steps])."""
        return initial_lr * (self._ratio(step - 1) if step > 0 else 0.0)

    def _ratio(self, iteration: int) -> float:
        num_steps = _num_warmup_steps(self.warmup_num_steps)
        if iteration < num_steps:
            risen = _warmup(iteration, num_steps, self.warmup_type)
            return self.warmup_min_ratio + risen * (1.0 - self.warmup_min_ratio)
        # The first iteration after the warm-up is already one step down. After the last step the ratio is constant.
        progress = min(1.0, (iteration - num_steps + 1) / max(1, self.total_num_steps - num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)
