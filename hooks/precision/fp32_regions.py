"""Runs a module in fp32 inside a model that computes in a low precision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import tree_map
from zeroamp.hooks.precision.wrapped_forward import WrappedForward


class Fp32Region(WrappedForward):
    """Runs a module's forward in fp32, with autocast off."""

    def __init__(self, module: nn.Module, device_type: str, output_dtype: torch.dtype | None) -> None:
        """Wrap `module.forward`; `remove` restores it.

        Floating-point inputs are cast to fp32, at any depth of containers. Floating-point outputs are cast to
        `output_dtype`, if it is given: in the modes bf16 and fp16, the modules around this one raise for fp32 inputs.
        """

        def to(value: Any, dtype: torch.dtype) -> Any:
            is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if is_floating else value

        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def in_fp32(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = tree_map(lambda value: to(value, torch.float32), (args, kwargs))
                with torch.autocast(device_type, enabled=False):
                    output = forward(*args, **kwargs)
                return output if output_dtype is None else tree_map(lambda value: to(value, output_dtype), output)

            return in_fp32

        super().__init__(module, wrap)
