"""`ZeroampOptimizer`: what `ZeroampAccelerator.prepare` returns for an optimizer."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from accelerate.optimizer import AcceleratedOptimizer

from zeroamp.policies.errors import StepError


class OptimizerDriver(Protocol):
    """What a `ZeroampOptimizer` calls: the accelerator."""

    def update(self, optimizer: "ZeroampOptimizer") -> None:
        """End the optimizer step."""

    def discard(self, optimizer: "ZeroampOptimizer") -> None:
        """Discard gradients that no update has used."""


class ZeroampOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper of an optimizer. Its `step` ends the optimizer step of the `TrainStep`."""

    def __init__(self, optimizer: torch.optim.Optimizer, driver: OptimizerDriver) -> None:
        # Without device_placement: it would load the state again, which is sharded already.
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
                "accelerator.backward(loss), then optimizer.step() without one."
            )
        if self.gradient_state.sync_gradients:
            self._driver.update(self)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard the gradients of an optimizer step that was not updated. After an update there are none.

        Inside of an optimizer step (not `accelerator.sync_gradients`) this does nothing, as accelerate's own.

        Raises:
            StepError: `set_to_none` is False: gradients are never kept as zeros.
        """
        if set_to_none is False:
            raise StepError(
                "optimizer.zero_grad was given set_to_none=False, but gradients are released after each update. Leave "
                "it out."
            )
        if self.gradient_state.sync_gradients:
            self._driver.discard(self)

    def updated(self, *, skipped: bool) -> None:
        """Take whether the last update was skipped: `step_was_skipped` returns it."""
        self._is_overflow = skipped
