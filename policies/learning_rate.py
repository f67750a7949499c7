"""Learning rates as pure functions of the optimizer step, for one param group. The curves are DeepSpeed's (0.19.8).

Step k = 0, 1, 2, … is the k-th optimizer step. DeepSpeed moves a scheduler after each step, and counts from the first
move: its iteration is k - 1. Step 0 has what its constructors set. Formulas keep DeepSpeed's order of operations, so
that the results are the same bits.

[Note: first steps] In every warm-up steps 0 and 1 are alike (iteration 0 is its first point, too), except that
WarmupCosineLR starts from 0 whatever warmup_min_ratio is. OneCycle starts its momentum from the minimum, and goes on
from the maximum.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

WarmupType = Literal["log", "linear"]

ONE_CYCLE_BETA2 = 0.99
"""What OneCycle sets the second beta to, whatever the optimizer had."""


class Curve(Protocol):
    """A learning rate over the steps."""

    def lr(self, step: int, initial_lr: float) -> float:
        """Return the learning rate of `step` (0 is the first) where the optimizer was built with `initial_lr`."""


def _warmup(iteration: int, num_steps: int, kind: WarmupType) -> float:
    """Return how far the warm-up has come, from 0 on, before it ends at `num_steps`. log reaches 1, linear nearly."""
    if kind == "linear":
        return iteration / num_steps
    return (1.0 / math.log(num_steps)) * math.log(iteration + 1)


def _num_warmup_steps(asked: int) -> int:
    # The logarithm of 1 divides.
    return max(2, asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupLR:
    """Up from `warmup_min_lr` to `warmup_max_lr` (None: the initial one), and constant there."""

    warmup_min_lr: float
    warmup_max_lr: float | None
    warmup_num_steps: int
    warmup_type: WarmupType

    def lr(self, step: int, initial_lr: float) -> float:
        """Return min + (max - min) * gamma; gamma goes from 0 to 1 over the warm-up."""
        num_steps, iteration = _num_warmup_steps(self.warmup_num_steps), max(0, step - 1)
        top = initial_lr if self.warmup_max_lr is None else self.warmup_max_lr
        gamma = _warmup(iteration, num_steps, self.warmup_type) if iteration < num_steps else 1.0
        return self.warmup_min_lr + (top - self.warmup_min_lr) * gamma


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupDecayLR:
    """Up from `warmup_min_lr` to `warmup_max_lr`, then along a line back to it at `total_num_steps`."""

    total_num_steps: int
    warmup_min_lr: float
    warmup_max_lr: float
    warmup_num_steps: int
    warmup_type: WarmupType

    def lr(self, step: int, initial_lr: float) -> float:  # noqa: ARG002  # the initial one plays no part
        """Return min + (max - min) * gamma; gamma goes from 0 to 1 and back."""
        num_steps, iteration = _num_warmup_steps(self.warmup_num_steps), max(0, step - 1)
        if iteration < num_steps:
            gamma = _warmup(iteration, num_steps, self.warmup_type)
        else:
            gamma = max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - num_steps))
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * gamma


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosineLR:
    """Up from `warmup_min_ratio` of the initial learning rate to all of it, then half a cosine to `cos_min_ratio`."""

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
        # The first iteration after the warm-up is one step down already; past the end the ratio stays where it is.
        progress = min(1.0, (iteration - num_steps + 1) / max(1, self.total_num_steps - num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)


@dataclass(frozen=True, kw_only=True, slots=True)
class LRRangeTest:
    """Up from `lr_range_test_min_lr` without end."""

    lr_range_test_min_lr: float
    lr_range_test_step_size: int
    lr_range_test_step_rate: float
    lr_range_test_staircase: bool

    def lr(self, step: int, initial_lr: float) -> float:  # noqa: ARG002  # the initial one plays no part
        """Return min * (1 + rate * units), where a staircase counts whole units."""
        units = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            units = math.floor(units)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * units)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneCycle:
    """Up and down once between `cycle_min_lr` and `cycle_max_lr`, then decay; the momentum goes the other way."""

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float
    cycle_first_step_size: float
    cycle_second_step_size: float | None
    cycle_first_stair_count: int
    cycle_second_stair_count: int | None
    decay_step_size: float
    cycle_momentum: bool
    cycle_min_mom: float
    cycle_max_mom: float
    decay_mom_rate: float

    def lr(self, step: int, initial_lr: float) -> float:  # noqa: ARG002  # the initial one plays no part
        """Return min + (max - min) * height in the cycle; min / (1 + rate * units) after it."""
        if self._is_in_cycle(step):
            return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(step)
        return self.cycle_min_lr / (1 + self.decay_lr_rate * self._decay_units(step))

    def momentum(self, step: int) -> float | None:
        """Return max - (max - min) * height in the cycle; max * (1 + rate * units) after it. None: not cycled.

        A positive `decay_mom_rate` therefore raises the momentum, as in DeepSpeed.
        """
        if not self.cycle_momentum:
            return None
        if step == 0:
            return self.cycle_min_mom  # [Note: first steps]
        if self._is_in_cycle(step):
            return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self._height(step)
        return self.cycle_max_mom * (1 + self.decay_mom_rate * self._decay_units(step))

    @property
    def _second(self) -> float:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def _total(self) -> float:
        return self.cycle_first_step_size + self._second

    def _is_in_cycle(self, step: int) -> bool:
        return step - 1 < self._total

    def _decay_units(self, step: int) -> float:
        return (step - self._total) / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self, step: int) -> float:
        """Return where the cycle stands at `step`: 0 at both ends, 1 at the top."""
        first, total = self.cycle_first_step_size, self._total
        turning_point = first / total
        position = 1.0 + step / total - math.floor(1 + step / total)
        is_rising = position <= turning_point
        stairs = self.cycle_first_stair_count
        if not is_rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if stairs > 0:
            return self._stair(step % total, stairs)
        return position / turning_point if is_rising else (position - 1) / (turning_point - 1)

    def _stair(self, steps: float, stairs: int) -> float:
        # From the count of steps, not from the height: rounding just below a stair would cost a whole one.
        is_rising = steps <= self.cycle_first_step_size
        position = steps * stairs / self.cycle_first_step_size
        if not is_rising:
            position = (self._total - steps) * stairs / self._second
        return math.floor(position) / stairs
