"""Learning rates as pure functions of the optimizer step, for one param group. The curves are DeepSpeed's (0.19.8).

Steps are numbered k = 0, 1, 2, … DeepSpeed advances a scheduler after each step, and counts from the first advance:
its iteration is k - 1. Step 0 has the values that DeepSpeed's constructors set. Formulas have DeepSpeed's order of
operations, so that the results are the same bits.

[Note: first steps]
In a warm-up, steps 0 and 1 have the same learning rate: that of iteration 0. The exception is WarmupCosineLR, which is
0 at step 0 with any warmup_min_ratio. OneCycle's momentum is the minimum at step 0. From step 1 on it falls from the
maximum.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

WarmupType = Literal["log", "linear"]

ONE_CYCLE_BETA2 = 0.99
"""The second beta that OneCycle sets. The optimizer's own second beta is not used."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LRRangeTest:
    """Rises from `lr_range_test_min_lr` without end."""

    lr_range_test_min_lr: float
    lr_range_test_step_size: int
    lr_range_test_step_rate: float
    lr_range_test_staircase: bool

    def lr(self, step: int, initial_lr: float) -> float:  # noqa: ARG002  # the initial learning rate is not used
        """Return min * (1 + rate * units), of `lr_range_test_step_size` steps each. A staircase counts whole units."""
        units = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            units = math.floor(units)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * units)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneCycle:
    """Rises and falls once between `cycle_min_lr` and `cycle_max_lr`, then decays. The momentum moves inversely."""

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

    def lr(self, step: int, initial_lr: float) -> float:  # noqa: ARG002  # the initial learning rate is not used
        """Return min + (max - min) * height in the cycle, and min / (1 + rate * units) after the cycle."""
        if self._is_in_cycle(step):
            return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(step)
        return self.cycle_min_lr / (1 + self.decay_lr_rate * self._decay_units(step))

    def momentum(self, step: int) -> float | None:
        """Return max - (max - min) * height in the cycle, and max * (1 + rate * units) after it.

        So a positive `decay_mom_rate` raises the momentum, as in DeepSpeed. None if `cycle_momentum` is false.
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
        """Return the height of the cycle at `step`: 0 at both ends, 1 at the top."""
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
        # Computed from the number of steps, because a height that is rounded to just below a stair would lose it.
        is_rising = steps <= self.cycle_first_step_size
        position = steps * stairs / self.cycle_first_step_size
        if not is_rising:
            position = (self._total - steps) * stairs / self._second
        return math.floor(position) / stairs
