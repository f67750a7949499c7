"""Casts the arguments of `zeroamp.autocast_ops` also when activation checkpointing recomputes a forward.

Checkpointing restores autocast, but not the `casting` context of the root's forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import is_in_backward
from zeroamp.hooks.precision.autocast_ops import casting
from zeroamp.hooks.precision.wrapped_forward import WrappedForward


class CastsInRecomputation(WrappedForward):
    """Wraps the forward of a module that runs ops of `zeroamp.autocast_ops`. Outside of a backward it is unchanged.

    Autograd runs backwards of accelerators in threads of its own, in which the forward's contexts are not active. The
    forward itself is wrapped, not hooked, so that a block that was compiled without the casts is compiled again.
    """

    def __init__(self, module: nn.Module, ops: frozenset[str]) -> None:
        """Wrap `module.forward`, and cast the arguments of `ops` (names of `zeroamp.autocast_ops`)."""

        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                # A compiled program already contains the casts: it was traced inside the root's forward.
                if torch.compiler.is_compiling() or not is_in_backward():
                    return forward(*args, **kwargs)
                with casting(ops):
                    return forward(*args, **kwargs)

            return run

        super().__init__(module, wrap)
