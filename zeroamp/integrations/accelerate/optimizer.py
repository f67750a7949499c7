"""`ZeroampOptimizer`: the optimizer wrapper that `ZeroampAccelerator.prepare` returns."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from zeroamp.integrations.loop_driver import LoopDriver
from zeroamp.policies.errors import StepError


class ZeroampOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's wrapper of an optimizer. Its `step` updates the parameters by the `TrainStep`."""

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Callable[[], LoopDriver]) -> None:
        """`loop`: returns the driver of the trained model and all its optimizers."""
        # device_placement=False: True would load the state again, which is sharded already.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._loop = loop

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters, if this is the end of an optimizer step (`accelerator.sync_gradients`).

        Raises:
            StepError: `closure` is given, no last backward has run, or `zeroamp.TrainStep` raises it.
        """
        if closure is not None:
            raise StepError(
                "optimizer.step was given a closure, which would run forward and backward again. Call "
                "accelerator.backward(loss), then optimizer.step() without a closure."
            )
        if self.gradient_state.sync_gradients:
            loop = self._loop()
            loop.step(self.optimizer)
            self._is_overflow = loop.was_skipped

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
            self._loop().zero_grad(self.optimizer)
