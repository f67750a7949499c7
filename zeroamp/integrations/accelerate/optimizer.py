"""`ZeroampOptimizer`: the optimizer wrapper that `ZeroampAccelerator.prepare` returns."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from accelerate.optimizer import AcceleratedOptimizer

from zeroamp.policies.errors import StepError


class OptimizerDriver(Protocol):
    """The methods of the accelerator that a `ZeroampOptimizer` calls."""

    def update(self, optimizer: "ZeroampOptimizer") -> None:
        """End the optimizer step."""

    def discard(self, optimizer: "ZeroampOptimizer") -> None:
        """Discard gradients that no update has used."""


class ZeroampOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's wrapper of an optimizer. Its `step` ends the optimizer step of the `TrainStep`."""

    def __init__(self, optimizer: torch.optim.Optimizer, driver: OptimizerDriver) -> None:
        # device_placement=False: True would load the state again, which is sharded already.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._driver = driver

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters, if this is the end of an optimizer step (`accelerator.sync_gradients`).

        Raises:
            StepError: `closure` is given, or see `zeroamp.TrainStep.step`.
        """
        if closure is not None:
            raise StepError(
                "optimizer.step was given a closure, which would run forward and backward again. Call "
                "accelerator.backward(loss), then optimizer.step() without a closure."
            )
        if self.gradient_state.sync_gradients:
            self._driver.update(self)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard gradients that no update has used. An update releases its gradients itself.

        Inside of an optimizer step (not `accelerator.sync_gradients`) this does nothing, as in accelerate.

        Raises:
            StepError: `set_to_none` is False. Gradients are always released.
        """
        if set_to_none is False:
            raise StepError(
                "optimizer.zero_grad was given set_to_none=False, but gradients are released after each update. Leave "
                "it out."
            )
        if self.gradient_state.sync_gradients:
            self._driver.discard(self)

    def updated(self, *, skipped: bool) -> None:
        """Set what `step_was_skipped` returns: whether the last update was skipped."""
        self._is_overflow = skipped
