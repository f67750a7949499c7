"""Casts an activation once for all safe Linears that read it, where `torch.autocast` casts it for each.

[Note: The same bits]
Under autocast q, k and v each make a low-precision copy of one tensor and keep it for their backward; so do gate and
up. The copies are equal, so one copy is shared. The backwards must stay separate: autocast casts each consumer's
gradient to fp32 before it adds them, but the gradients of one shared copy would be added in low precision. So each
consumer after the first gets the copy through an autograd function whose backward casts to fp32, as autocast's does.
"""

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def linears_that_may_share(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return those of one unit's modules of which another reads inputs of the same width."""
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    linears = [linear for linear in linears if type(linear).forward is nn.Linear.forward]
    widths = [linear.in_features for linear in linears]
    return [linear for linear, width in zip(linears, widths, strict=True) if widths.count(width) > 1]


class _Shared(torch.autograd.Function):
    """Takes a tensor and its copy; is the cast of the one to the other."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


class SharedCasts:
    """Keeps the last copy for as long as the tensor that it is of lives unchanged."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._of: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._copy: torch.Tensor | None = None

    def attach(self, linear: nn.Linear) -> RemovableHandle:
        """Give the Linear's forward, where it is called with one positional fp32 tensor, the shared copy."""
        return linear.register_forward_pre_hook(self._cast)

    def _cast(self, _linear: nn.Module, args: tuple[Any, ...]) -> torch.Tensor | None:
        if torch.compiler.is_compiling() or len(args) != 1:  # a compiler fuses the casts
            return None
        tensor = args[0]
        if not (isinstance(tensor, torch.Tensor) and self._is_cast_by_autocast(tensor)):
            return None
        copy = self._copy_of(tensor)
        if copy is None:
            low = tensor.to(torch.get_autocast_dtype(self._device_type))
            self._of, self._version, self._copy = weakref.ref(tensor, self._forget), tensor._version, low.detach()
            return low
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return copy
        return cast(torch.Tensor, _Shared.apply(tensor, copy))  # type: ignore[no-untyped-call]

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        is_known = self._of is not None and self._of() is tensor and self._version == tensor._version
        return self._copy if is_known else None

    def _is_cast_by_autocast(self, tensor: torch.Tensor) -> bool:
        """Whether autocast makes a copy for each reader; of leaves it makes one for all, as of weights."""
        return (
            tensor.dtype == torch.float32
            and tensor.device.type == self._device_type
            and torch.is_autocast_enabled(self._device_type)
            and not (tensor.is_leaf and tensor.requires_grad)
            and not tensor.is_inference()  # these have no version
        )

    def _forget(self, of: weakref.ref[torch.Tensor]) -> None:
        if self._of is of:
            self._of = self._copy = None
