"""Wraps the forward of a module, and undoes it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn


class WrappedForward:
    """A module whose forward was wrapped.

    The forward itself is wrapped, not hooked: a `with` inside a function can be compiled into one graph, a context that
    one hook enters and another leaves cannot.
    """

    def __init__(self, module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `module.forward` by what `wrap` makes of it."""
        self._module = module
        self._before: Callable[..., Any] | None = module.__dict__.get("forward")
        forward = module.forward
        module.forward = wraps(forward)(wrap(forward))

    def remove(self) -> None:
        """Put the module's own forward back."""
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before
