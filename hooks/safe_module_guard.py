"""Names the module whose parameters were gathered low for autocast, where autocast is locally off."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.policies.errors import PrecisionError, describe


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
