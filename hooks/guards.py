"""Names the module whose parameters were gathered low for autocast, where autocast is locally off."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.errors import PrecisionError, StepError, describe


def attach_safe_module_guard(module: nn.Module, fqn: str, device_type: str) -> RemovableHandle:
    """Raise before a forward of a safe module outside autocast, where it would compute in low precision unasked."""

    def check(module: nn.Module, _args: Any) -> None:
        if not torch.is_autocast_enabled(device_type):
            raise PrecisionError(
                describe(
                    fqn,
                    f"a {type(module).__name__} that runs with autocast off, and whose parameters were gathered low",
                    "safe modules under the config's autocast only",
                    "Leave its class out of torch_autocast.lower_precision_safe_modules: it is then gathered in fp32.",
                )
            )

    return module.register_forward_pre_hook(check)


class BackwardGuard:
    """Raises in a backward through the model's outputs unless `armed` (set by `TrainStep.backward`).

    Attached only where the config asks for what a plain `loss.backward(); optimizer.step()` would leave out.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.armed = False

    def attach(self, module: nn.Module) -> RemovableHandle:
        """Watch the outputs of `module`; return the handle.

        Before FSDP2's own post-forward hook, so that of the hooks on an output tensor this one runs first: raising
        after FSDP2's pre-backward would leave its backward begun for ever.
        """
        return module.register_forward_hook(lambda _module, _args, output: self.watch(output), prepend=True)

    def watch(self, output: object) -> None:
        """Observe the tensors in `output`; it goes on unchanged."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, _grad: torch.Tensor) -> None:
        if not self.armed:
            raise StepError(
                describe(
                    "backward",
                    f"loss.backward() with {self.reason}",
                    "zeroamp.TrainStep(model, optimizer).backward(loss), then .step()",
                    "A plain backward would leave that part of the config out.",
                )
            )
