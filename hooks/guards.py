"""Guards that raise: a safe module that runs with autocast off, and a backward that bypasses `TrainStep`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.errors import PrecisionError, StepError


def attach_safe_module_guard(module: nn.Module, fqn: str, device_type: str) -> RemovableHandle:
    """Raise before a forward of a safe module outside autocast, where it would compute in low precision unasked."""

    def check(module: nn.Module, _args: Any) -> None:
        if not torch.is_autocast_enabled(device_type):
            raise PrecisionError(
                f"{fqn} (a {type(module).__name__}) ran with autocast off, but its parameters are all-gathered in "
                "low precision. Leave its class out of torch_autocast.lower_precision_safe_modules: its parameters "
                "then stay fp32."
            )

    return module.register_forward_pre_hook(check)


class BackwardGuard:
    """Raises in a backward through the model's outputs, unless a `TrainStep.backward` of this process runs it.

    Attached only if the config sets a key that a plain `loss.backward(); optimizer.step()` would ignore.
    """

    armed: ClassVar[bool] = False
    """Whether a `TrainStep.backward` is running, of any model: the loss of a generator is computed by another one. The
    gradients that it leaves on the other model are refused by that model's own `TrainStep`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @classmethod
    @contextmanager
    def let_pass(cls) -> Iterator[None]:
        """Let the backwards inside the context pass."""
        cls.armed = True
        try:
            yield
        finally:
            cls.armed = False

    def watch(self, output: object) -> None:
        """Watch the tensors in an output of the model, which stays unchanged.

        Called before FSDP2's own post-forward hook, so that this hook on an output tensor is the first of them: raising
        after FSDP2's pre-backward would leave its backward begun for ever.
        """
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, _grad: torch.Tensor) -> None:
        if not self.armed:
            raise StepError(
                f"loss.backward() was called, but the config has {self.reason}, which a plain backward leaves out. "
                "Call zeroamp.TrainStep(model, optimizer).backward(loss), then .step()."
            )
