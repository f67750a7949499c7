"""What `torch.autocast` the caller has around the model's forward, and what the config makes of it.

| config | around the forward | result |
|---|---|---|
| torch_autocast | the same dtype | nothing to say |
| torch_autocast | another dtype, or `enabled=False` | one warning per model; the config wins |
| fp32, bf16 or fp16 | autocast on | PrecisionError, unless `zeroamp.external_autocast` is "allow" |

Only the device type that the model runs on counts. What the model opens inside its forward is its own business.
"""

import logging
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import PrecisionError, describe

logger = logging.getLogger("zeroamp")

_OTHER_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")


def warn_if_different(device_type: str, dtype: torch.dtype) -> bool:
    """Log a warning if the caller's autocast is not the config's; return whether it did."""
    if torch.is_autocast_enabled(device_type):
        found = torch.get_autocast_dtype(device_type)
        if found == dtype:
            return False
        words = f"torch.autocast({device_type!r}, dtype={found})"
    elif _is_inside_disabled(device_type):
        words = f"torch.autocast({device_type!r}, enabled=False)"
    else:
        return False
    logger.warning(
        "%s around the model's forward, and torch_autocast.dtype %s in the config: inside the model the config's "
        "holds. Remove the one around it.",
        *(words, short_name(dtype)),
    )
    return True


def _is_inside_disabled(device_type: str) -> bool:
    """Whether an autocast context is entered that enables nothing: state alone does not tell it from none at all."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    others = [name for name in _OTHER_DEVICE_TYPES if name != device_type and torch.amp.is_autocast_available(name)]
    return depth > 0 and not any(torch.is_autocast_enabled(name) for name in others)


class OuterAutocastGuard:
    """Raises before a forward that runs inside the caller's autocast, for a config that has none."""

    def __init__(self, device_type: str, mode: str) -> None:
        self.device_type = device_type
        self.mode = mode

    def attach(self, module: nn.Module) -> RemovableHandle:
        """Register on `module`, before everything else: nothing is gathered yet when it raises."""
        return module.register_forward_pre_hook(self._before, prepend=True)

    @untraced
    def _before(self, _module: nn.Module, _args: Any) -> None:
        self.check()

    def check(self) -> None:
        """Raise PrecisionError if the caller's autocast is on for this device type."""
        if torch.is_autocast_enabled(self.device_type):
            dtype = torch.get_autocast_dtype(self.device_type)
            raise PrecisionError(
                describe(
                    "the model's forward",
                    f"torch.autocast({self.device_type!r}, dtype={dtype}) around it, with {self.mode} precision",
                    "no autocast around it, or one that the config asks for",
                    f'For its numerics write "torch_autocast": {{"enabled": true, "dtype": "{short_name(dtype)}"}} in '
                    'the config; to let it through, "zeroamp": {"external_autocast": "allow"}.',
                )
            )
