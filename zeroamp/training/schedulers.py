"""The learning-rate scheduler that the config's `scheduler` block asks for."""

from collections.abc import Callable
from typing import Any

import torch

from zeroamp.policies import ConfigError, StepError, learning_rate
from zeroamp.policies.schema import SchedulerBlock
from zeroamp.training.optimizers import PolicyLike, policy_of

CURVES: dict[str, Callable[..., learning_rate.Curve]] = {
    "LRRangeTest": learning_rate.LRRangeTest,
    "OneCycle": learning_rate.OneCycle,
    "WarmupCosineLR": learning_rate.WarmupCosineLR,
    "WarmupDecayLR": learning_rate.WarmupDecayLR,
    "WarmupLR": learning_rate.WarmupLR,
}
"""The curve of each `scheduler.type`. Its fields are the keys of `scheduler.params`, for one param group."""


class CurveLR(torch.optim.lr_scheduler.LRScheduler):
    """Sets every param group to its curve; for a OneCycle with momentum, its betas as well.

    `last_epoch` is the number of the coming optimizer step, from 0 on. `TrainStep` moves it, or `step()` does after
    each `optimizer.step()`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, curves: list[learning_rate.Curve]) -> None:
        """Put the optimizer on step 0, with one curve per param group."""
        self.curves = curves
        super().__init__(optimizer)  # its last act is a step() from -1 to 0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of the coming step, per param group."""
        pairs = zip(self.curves, self.base_lrs, strict=True)
        return [curve.lr(self.last_epoch, float(base_lr)) for curve, base_lr in pairs]

    def step(self, epoch: int | None = None) -> None:
        """Go to the next step, or to step `epoch`.

        Torch's own would also warn where `optimizer.step` was not called or was replaced in between. A step that
        float16 skips looks like that, and a curve over step numbers needs no such order.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the learning rates that the curves start from, as plain numbers."""
        return {"last_epoch": self.last_epoch, "base_lrs": [float(base_lr) for base_lr in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved step, and set the learning rates there: the optimizer's state may be loaded before or after.

        Raises:
            StepError: the state is not one of `state_dict`, or of an optimizer with another number of param groups.
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
        for group, curve, lr in zip(self.optimizer.param_groups, self.curves, values, strict=True):
            # A learning rate that is a tensor (capturable, compiled) is read where it lies.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            momentum = curve.momentum(self.last_epoch) if isinstance(curve, learning_rate.OneCycle) else None
            if momentum is not None:
                group["betas"] = (momentum, learning_rate.ONE_CYCLE_BETA2)
        self._last_lr = values


def scheduler_from_config(cfg: PolicyLike, optimizer: torch.optim.Optimizer, /, **auto: Any) -> CurveLR:
    """Build the scheduler of the config's `scheduler` block, for `TrainStep(scheduler=)` or a plain loop.

    Every optimizer step has the learning rate that DeepSpeed's engine has there, from the first on.

    Args:
        cfg: a policy, or what `policy_from_config` takes.
        optimizer: its learning rates are set at once. WarmupCosineLR, and WarmupLR without a maximum, start from those
            it has ("initial_lr" of its param groups, where an earlier scheduler has left one).
        auto: what `policy_from_config` takes beside a config; nothing with a policy.

    Raises:
        ConfigError: the config is wrong, has no `scheduler`, or has one that does not fit the optimizer.
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
    """Return the curve of param group `index`: where a key has one value per group, its own."""
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
    if getattr(block.params, "cycle_momentum", False) and "betas" not in optimizer.defaults:
        raise ConfigError(
            f"scheduler.params.cycle_momentum is true, but {type(optimizer).__name__} has no betas. Write false, or "
            "use an optimizer with betas such as AdamW. DeepSpeed leaves the momentum alone there, too."
        )
