"""Runs a module in fp32 inside a model that computes in a low precision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import tree_map
from zeroamp.hooks.precision.wrapped_forward import WrappedForward


class Fp32Region(WrappedForward):
    """Lets a module's forward take and compute fp32, with autocast off."""

    def __init__(self, module: nn.Module, device_type: str, output_dtype: torch.dtype | None) -> None:
        """Wrap `module.forward`.

        Floating-point tensors go in as fp32. They come out as they are, or where `output_dtype` is given as that:
        modules around this one compute in it and would refuse fp32. (Under autocast they take both.)
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
