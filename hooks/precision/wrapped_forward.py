"""Wraps the forward of a module, and can restore it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn


class WrappedForward:
    """Replaces the forward of a module by a wrapper of it.

    The forward itself is wrapped, not hooked: a `with` inside a function can be compiled into one graph. A context that
    one hook enters and another exits cannot.
    """

    def __init__(self, module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `module.forward` by `wrap(module.forward)`; `remove` restores it."""
        self._module = module
        self._before: Callable[..., Any] | None = module.__dict__.get("forward")
        forward = module.forward
        module.forward = wraps(forward)(wrap(forward))

    def remove(self) -> None:
        """Restore the module's forward as it was before."""
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before
