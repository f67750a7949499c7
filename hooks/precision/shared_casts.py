"""Casts an activation once for all safe Linears that read it. `torch.autocast` casts it once for each Linear.

[Note: The same bits]
Under autocast the Linears q, k and v of an attention each make a low-precision copy of one tensor and save it for their
backward; so do gate and up. The copies are equal, so one copy is shared. The backwards must stay separate: autocast
casts each consumer's gradient to fp32 and then adds them, but the gradients of one shared copy would be added in low
precision. So each consumer after the first gets the copy through an autograd function whose backward casts to fp32, as
autocast's does.

[Note: A native node]
An autograd function in Python takes several times the host time of a cast by torch, in forward and backward. So a small
tensor is cast again by torch, which also makes the autograd node. The kernel of that cast takes little time. The result
of the cast is released at once, and the node's output gets the memory of the shared copy. So the backward saves no more
bytes than with the shared copy alone.
"""

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

MAX_NUMEL_OF_NODE = 2**20
"""Elements of the largest tensor that is cast again. The cast reads and writes 6 MiB: 2 to 3 microseconds at an H100's
3.35 TB/s, computed from the data sheet and not measured."""
MAX_NUMEL_OF_NODE_ON_CPU = 2**13
"""The same on a CPU, where the host itself runs the cast."""


def linears_that_may_share(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the Linears among one unit's modules that have the input width of at least one other Linear."""
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    linears = [linear for linear in linears if type(linear).forward is nn.Linear.forward]
    widths = [linear.in_features for linear in linears]
    return [linear for linear, width in zip(linears, widths, strict=True) if widths.count(width) > 1]


class _Shared(torch.autograd.Function):
    """Returns `copy` as the cast of `tensor`. Its backward casts the gradient to the dtype of `tensor`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


class SharedCasts:
    """Retains the cast of the last activation, for as long as the activation is alive and not changed in place."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._max_numel_of_node = MAX_NUMEL_OF_NODE_ON_CPU if device_type == "cpu" else MAX_NUMEL_OF_NODE
        self._of: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._copy: torch.Tensor | None = None

    def attach(self, linear: nn.Linear) -> RemovableHandle:
        """Make the Linear's forward use the shared copy, if it is called with one positional fp32 tensor."""
        return linear.register_forward_pre_hook(self._cast)

    def _cast(self, _linear: nn.Module, args: tuple[Any, ...]) -> torch.Tensor | None:
        return self.cast(args) if torch.is_autocast_enabled(self._device_type) else None

    def cast(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the copy for a Linear's forward with these arguments, or None to leave them. Call with autocast on."""
        if torch.compiler.is_compiling() or len(args) != 1:  # a compiler fuses the casts
            return None
        tensor: Any = args[0]
        of, copy = None if self._of is None else self._of(), self._copy
        is_known = of is not None and of is tensor and copy is not None and self._version == of._version
        if not is_known and not self._is_cast_by_autocast(tensor):
            return None
        requires_grad = tensor.requires_grad
        if requires_grad and tensor.is_leaf:  # autocast itself caches the cast of a leaf, as of a weight
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
        """Return whether autocast casts `value`, an argument of a Linear. Inference tensors are left out: they have no
        version counter.
        """
        return (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
            and value.device.type == self._device_type
            and not value.is_inference()
        )

    def _forget(self, of: weakref.ref[torch.Tensor]) -> None:
        if self._of is of:
            self._of = self._copy = None
