"""Casts the ops of `zeroamp.autocast_ops` when activation checkpointing recomputes a forward.

Checkpointing restores autocast, but not the `casting` context of the root's forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroamp.hooks._torch.autocast_ops import casting
from zeroamp.hooks._torch.dispatch import is_in_backward
from zeroamp.hooks.precision.wrapped_forward import WrappedForward


class CastsInRecomputation(WrappedForward):
    """Wraps the forward of a module that runs such ops; outside of a backward the forward is unchanged.

    Autograd runs backwards of accelerators in threads of its own, so that nothing that the forward entered is there.
    The forward itself is wrapped, not hooked: a compiled block is then another program than one without the casts.
    """

    def __init__(self, module: nn.Module, ops: frozenset[str]) -> None:
        """Wrap `module.forward`."""

        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                # A compiled program holds the casts that were there when it was traced, inside the root's forward.
                if torch.compiler.is_compiling() or not is_in_backward():
                    return forward(*args, **kwargs)
                with casting(ops):
                    return forward(*args, **kwargs)

            return run

        super().__init__(module, wrap)
