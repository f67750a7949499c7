"""Runs a module's forward under `torch.autocast`, so that user code holds none."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks.precision.outer_autocast import warn_if_different


class AutocastHook:
    """Enters `torch.autocast` before a module's forward and leaves it after, also when the forward raises."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        # A stack, since a forward may call its own module again (generation does).
        self._entered: list[torch.autocast] = []
        self._has_warned = False  # about another autocast around the forward; once per model

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Register on `module`, first before everything else and last after it; return the handles.

        First and last, because the pair must be closed whatever another hook raises in between.
        """
        return [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, prepend=False, always_call=True),
        ]

    def context(self) -> torch.autocast:
        """Return a new autocast context of the same kind, for methods that are no `forward`."""
        return torch.autocast(self.device_type, dtype=self.dtype)

    def reset(self) -> None:
        """Leave what forwards left entered: a KeyboardInterrupt calls no hook."""
        while self._entered:
            self._entered.pop().__exit__(None, None, None)

    def look_around(self) -> None:
        """Warn, once, if the caller has another autocast around the forward."""
        if not (self._has_warned or self._entered):
            self._has_warned = warn_if_different(self.device_type, self.dtype)

    @untraced
    def _enter(self, _module: nn.Module, _args: Any) -> None:
        self.look_around()
        context = self.context()
        context.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(context)

    @untraced
    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._entered.pop().__exit__(None, None, None)
