"""Refuses a backward that the config says would train wrongly: one that does not go through `TrainStep`."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.policies.errors import StepError, describe


class BackwardGuard:
    """Raises in a backward through the model's outputs unless `armed` (set by `TrainStep.backward`).

    Attached only where the config asks for what a plain `loss.backward(); optimizer.step()` would leave out.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.armed = False

    def attach(self, module: nn.Module) -> RemovableHandle:
        """Watch the outputs of `module`; return the handle."""
        return module.register_forward_hook(self._watch, prepend=False)

    def _watch(self, _module: nn.Module, _args: Any, output: Any) -> None:
        # An observer: the output goes on unchanged.
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, _grad: torch.Tensor) -> None:
        if not self.armed:
            raise StepError(
                describe(
                    "backward",
                    f"loss.backward() with {self.reason}",
                    "zeroamp.TrainStep(model, optimizer).backward(loss), then .step()",
                    "A plain backward would leave that part of the config out.",
                )
            )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
