"""Builds the learning-rate scheduler of the config's `scheduler` block."""

import logging
from typing import Any

import torch

from zeroamp.optimizers.from_config import PolicyLike, policy_of
from zeroamp.optimizers.scheduler_params import Curve
from zeroamp.policies.errors import ConfigError

logger = logging.getLogger("zeroamp")


class CurveLR(torch.optim.lr_scheduler.LRScheduler):
    """Sets the learning rate of every param group from a curve.

    `last_epoch` is the number of the next optimizer step, from 0 on. `step()` increments it: `TrainStep` calls `step()`
    after each update; a plain loop calls it after each `optimizer.step()`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, curve: Curve) -> None:
        """Set the learning rates of step 0."""
        self.curve = curve
        super().__init__(optimizer)  # ends with step(), from -1 to 0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of the next optimizer step, one per param group."""
        return [self.curve.lr(self.last_epoch, float(base), group) for group, base in enumerate(self.base_lrs)]

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
        """Restore the step and set its learning rates. The optimizer's state may be loaded before or after."""
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
    if not isinstance(block.params, Curve):
        raise AssertionError(f"expected the params of a curve, got {block.params!r}")
    warn_of_long_warmup(block.params)
    _check_fits(block.params, optimizer)
    return CurveLR(optimizer, block.params)


def warn_of_long_warmup(params: object) -> None:
    """Log a warning if the `scheduler.params` have a warm-up that does not end before the run does."""
    values = dict(params) if isinstance(params, Curve) else {}
    if (total := values.get("total_num_steps")) is not None and values["warmup_num_steps"] >= total:
        logger.warning(
            "scheduler.params.warmup_num_steps is %d, but total_num_steps is %d: the run ends before the learning rate "
            "has reached its maximum. Set fewer warm-up steps.",
            *(values["warmup_num_steps"], total),
        )


def _check_fits(curve: Curve, optimizer: torch.optim.Optimizer) -> None:
    num_groups = len(optimizer.param_groups)
    for key, value in curve:
        if isinstance(value, tuple) and len(value) != num_groups:
            raise ConfigError(
                f"scheduler.params.{key} has {len(value)} values, but the optimizer has {num_groups} param groups. "
                "Write one number, or one per param group in their order."
            )
