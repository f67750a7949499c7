"""Fused experts of transformers: 3-D parameters of one module, one slice for each expert. And a routing for fake runs.

[Note: Balanced routing]
transformers' "eager" experts loop over the experts that some token chose, and index by the tokens that chose each. On
fake tensors these indices are not known. `route_evenly` gives the answers inside the forward of such a module: every
expert is chosen, by equally many tokens (one more for the first ones, where they do not divide). The other
implementations, "batched_mm" and "grouped_mm", have the same shapes and FLOPs for any routing, and need no answer.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Implementation = Literal["eager", "batched_mm", "grouped_mm"]


def experts_implementation(module: nn.Module) -> str | None:
    """Return how a module of transformers' fused experts multiplies, an `Implementation` or another; None for others.

    "eager" loops over the experts, "batched_mm" copies the slices that the tokens chose, "grouped_mm" is one product.
    """
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return implementation if isinstance(implementation, str) and _num_experts(module) else None


def _num_experts(module: nn.Module) -> int:
    """Return the slices of a module's own 3-D parameters; 0 if it has none."""
    return next((len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 3), 0)


def route_evenly(model: nn.Module) -> None:
    """Give the "eager" experts in `model` a balanced routing, by wrapping their forwards. See [Note: Balanced routing].

    For a run on fake tensors, inside `tensors_replaced`, which undoes it.
    """
    for module in model.modules():
        if experts_implementation(module) == "eager":
            module.forward = _with_balanced_routing(module.forward, _num_experts(module))


def _with_balanced_routing(forward: Callable[..., Any], num_experts: int) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _BalancedRouting(num_experts):
            return forward(*args, **kwargs)

    return run


class _BalancedRouting(TorchFunctionMode):
    """Answers which experts were chosen (`nonzero` of a 1-D tensor), and by which tokens (`where` of one mask each)."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._num_asked = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer these two questions; run anything else."""
        name = getattr(func, "__name__", "")
        if name == "nonzero" and len(args) == 1 and not kwargs and args[0].dim() == 1:
            self._num_asked = 0
            return [[expert] for expert in range(self._num_experts)]
        if name == "where" and len(args) == 1 and not kwargs and args[0].dim() == 2:
            mask: torch.Tensor = args[0]  # [choices of a token, tokens], of one expert
            expert, self._num_asked = self._num_asked, self._num_asked + 1
            num_chosen = mask.numel() // self._num_experts + (expert < mask.numel() % self._num_experts)
            return torch.empty(num_chosen, 2, dtype=torch.long, device=mask.device).unbind(1)
        return func(*args, **(kwargs or {}))
