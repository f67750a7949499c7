"""Casts an activation once for all safe Linears that read it, where `torch.autocast` casts it for each.

[Note: The same bits]
Under autocast q, k and v each make a low-precision copy of one tensor and keep it for their backward; so do gate and
up. The copies are equal, so one copy is shared. The backwards must stay separate: autocast casts each consumer's
gradient to fp32 before it adds them, but the gradients of one shared copy would be added in low precision. So each
consumer after the first gets the copy through an autograd function whose backward casts to fp32, as autocast's does.

[Note: A native node]
An autograd function in Python takes the host several times as long, in forward and backward, as a cast by torch. So a
small tensor is cast again, by a kernel that ends before the host could launch the next one. The result is released at
once: the shared copy takes its place under the node that torch made, so that no more bytes are saved.
"""

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

MAX_NUMEL_OF_NODE = 2**20
"""Elements of the largest tensor that is cast again: 6 MiB are read and written, in 2 to 3 microseconds on an H100."""
MAX_NUMEL_OF_NODE_ON_CPU = 2**13
"""The same where the host itself casts."""


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
        self._max_numel_of_node = MAX_NUMEL_OF_NODE_ON_CPU if device_type == "cpu" else MAX_NUMEL_OF_NODE
        self._of: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._copy: torch.Tensor | None = None

    def attach(self, linear: nn.Linear) -> RemovableHandle:
        """Give the Linear's forward, where it is called with one positional fp32 tensor, the shared copy."""
        return linear.register_forward_pre_hook(self._cast)

    def _cast(self, _linear: nn.Module, args: tuple[Any, ...]) -> torch.Tensor | None:
        return self.cast(args) if torch.is_autocast_enabled(self._device_type) else None

    def cast(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the copy for a Linear's forward with these arguments. None: leave them. Call with autocast on."""
        if torch.compiler.is_compiling() or len(args) != 1:  # a compiler fuses the casts
            return None
        tensor: Any = args[0]
        of, copy = None if self._of is None else self._of(), self._copy
        is_known = of is not None and of is tensor and copy is not None and self._version == of._version
        if not is_known and not self._is_cast_by_autocast(tensor):
            return None
        requires_grad = tensor.requires_grad
        if requires_grad and tensor.is_leaf:  # of leaves, autocast makes one copy for all readers, as of weights
            return None
        if copy is None or not is_known:
            low: torch.Tensor = tensor.to(torch.get_autocast_dtype(self._device_type))
            self._of, self._version, self._copy = weakref.ref(tensor, self._forget), tensor._version, low.detach()
            return low
        if not (requires_grad and torch.is_grad_enabled()):
            return copy
        if type(tensor) is torch.Tensor and tensor.numel() <= self._max_numel_of_node:  # see [Note: A native node]
            low = tensor.to(copy.dtype)
            low.data = copy
            return low
        return cast(torch.Tensor, _Shared.apply(tensor, copy))  # type: ignore[no-untyped-call]

    def _is_cast_by_autocast(self, value: Any) -> bool:
        """Whether autocast casts an argument of a Linear, and it has a version. Those of inference mode have none."""
        return (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
            and value.device.type == self._device_type
            and not value.is_inference()
        )

    def _forget(self, of: weakref.ref[torch.Tensor]) -> None:
        if self._of is of:
            self._of = self._copy = None
