"""Calls back around the outermost forwards with gradients of a model, with their inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import untraced


class TrainingForwards:
    """Calls `enter(args, kwargs)` and `leave()` around each. Inputs and outputs are returned unchanged."""

    def __init__(self, enter: Callable[[tuple[Any, ...], Mapping[str, Any]], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._depth = 0
        self._is_open = False

    def attach(self, root: nn.Module) -> list[RemovableHandle]:
        """Register on the root, around what unshards and reshards; return the handles."""
        return [
            root.register_forward_pre_hook(
                lambda _module, args, kwargs: self._begin(args, kwargs), prepend=True, with_kwargs=True
            ),
            # Called also when the forward raised.
            root.register_forward_hook(lambda _module, _args, _output: self._end(), prepend=False, always_call=True),
        ]

    def reset(self) -> None:
        """Forget forwards that a KeyboardInterrupt ended."""
        self._depth, self._is_open = 0, False

    @untraced
    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._depth == 0 and torch.is_grad_enabled():
            self._is_open = True
            self._enter(args, kwargs)
        self._depth += 1

    @untraced
    def _end(self) -> None:
        self._depth = max(self._depth - 1, 0)  # a hook before `_begin` may have raised
        if self._depth == 0 and self._is_open:
            self._is_open = False
            self._leave()
