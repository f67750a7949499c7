"""Builds the learning-rate scheduler of the config's `scheduler` block."""

from collections.abc import Callable
from typing import Any

import torch

from zeroamp.optimizers import learning_rate
from zeroamp.optimizers.from_config import PolicyLike, policy_of
from zeroamp.policies.errors import ConfigError, StepError
from zeroamp.policies.schema import SchedulerBlock

CURVES: dict[str, Callable[..., learning_rate.Curve]] = {
    "WarmupCosineLR": learning_rate.WarmupCosineLR,
    "WarmupDecayLR": learning_rate.WarmupDecayLR,
    "WarmupLR": learning_rate.WarmupLR,
}
"""The curve of each `scheduler.type`. Its fields are the keys of `scheduler.params`, for one param group."""


class CurveLR(torch.optim.lr_scheduler.LRScheduler):
    """Sets the learning rate of every param group from a curve.

    `last_epoch` is the number of the next optimizer step, from 0 on. `step()` increments it: `TrainStep` calls `step()`
    after each update; a plain loop calls it after each `optimizer.step()`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, curves: list[learning_rate.Curve]) -> None:
        """Set the learning rates of step 0. `curves` has one curve per param group."""
        self.curves = curves
        super().__init__(optimizer)  # ends with step(), from -1 to 0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of the next optimizer step, one per param group."""
        pairs = zip(self.curves, self.base_lrs, strict=True)
        return [curve.lr(self.last_epoch, float(base_lr)) for curve, base_lr in pairs]

    def step(self, epoch: int | None = None) -> None:
        """Go to the next step, or to step `epoch`.

        Unlike torch's `LRScheduler.step`, this does not warn if `optimizer.step` was not called before it. float16
        skips `optimizer.step` on overflow, and a curve over step numbers does not depend on that order.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next step, and the base learning rate of each param group, as plain numbers."""
        return {"last_epoch": self.last_epoch, "base_lrs": [float(base_lr) for base_lr in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step and set its learning rates. The optimizer's state may be loaded before or after.

        Raises:
            StepError: the state is not from `state_dict`, or has another number of param groups.
        """
        num_groups = len(self.curves)
        if set(state_dict) != {"last_epoch", "base_lrs"} or len(state_dict["base_lrs"]) != num_groups:
            raise StepError(
                f"scheduler.load_state_dict got {state_dict!r}, but needs last_epoch, and base_lrs for {num_groups} "
                "param groups. Load what state_dict() of the same scheduler returned."
            )
        self.last_epoch, self.base_lrs = state_dict["last_epoch"], list(state_dict["base_lrs"])
        self._apply()

    def _apply(self) -> None:
        values = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, values, strict=True):
            # A tensor (capturable, compiled) is updated in place: compiled code reads this tensor.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = values


def scheduler_from_config(cfg: PolicyLike, optimizer: torch.optim.Optimizer, /, **auto: Any) -> CurveLR:
    """Build the scheduler of the config's `scheduler` block, for `TrainStep(scheduler=)` or a plain loop.

    Every optimizer step, from the first on, has the same learning rate as in DeepSpeed's engine.

    Args:
        cfg: a `Policy`, or a config for `policy_from_config`: a mapping or the path of a JSON file.
        optimizer: its learning rates are set by this call. WarmupCosineLR, and WarmupLR without a maximum, use the
            optimizer's present learning rates as base ("initial_lr" of its param groups, if an earlier scheduler set
            it).
        auto: keyword arguments of `policy_from_config`. Must be empty if `cfg` is a `Policy`.

    Raises:
        ConfigError: the config is invalid, has no `scheduler`, or has one that does not fit the optimizer.
    """
    block = policy_of(cfg, auto).scheduler
    if block is None:
        raise ConfigError(
            'The config has no "scheduler". Add it, such as {"type": "WarmupLR", "params": {"warmup_num_steps": '
            "100}}, or build the scheduler yourself."
        )
    _check_fits(block, optimizer)
    return CurveLR(optimizer, [_curve(block, index) for index in range(len(optimizer.param_groups))])


def _curve(block: SchedulerBlock, index: int) -> learning_rate.Curve:
    """Return the curve of param group `index`. A key with one value per group uses the value at `index`."""
    keys = block.params.model_dump(exclude={"last_batch_iteration"})
    return CURVES[block.type](**{key: _of_group(value, index) for key, value in keys.items()})


def _of_group(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, tuple) else value


def _check_fits(block: SchedulerBlock, optimizer: torch.optim.Optimizer) -> None:
    num_groups = len(optimizer.param_groups)
    for key, value in block.params:
        if isinstance(value, tuple) and len(value) != num_groups:
            raise ConfigError(
                f"scheduler.params.{key} has {len(value)} values, but the optimizer has {num_groups} param groups. "
                "Write one number, or one per param group in their order."
            )
