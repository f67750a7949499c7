"""Finds transformers' fused experts (3-D parameters with one slice per expert), and routes tokens in fake runs.

[Note: Balanced routing]
transformers' "eager" experts loop over the experts that some token chose, and index by the tokens that chose each. On
fake tensors these indices are not known. `route_evenly` supplies them inside the forward of such a module: every expert
is chosen by equally many tokens (the first ones by one more, if there is a remainder). The other implementations,
"batched_mm" and "grouped_mm", have the same shapes and FLOPs for any routing, and are not changed.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Implementation = Literal["eager", "batched_mm", "grouped_mm"]


def experts_implementation(module: nn.Module) -> str | None:
    """Return the implementation of a module of transformers' fused experts; None for other modules.

    It is an `Implementation`, or a name that this release does not know. "eager" loops over the experts, "batched_mm"
    copies the slices that the tokens chose, "grouped_mm" is one product.
    """
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return implementation if isinstance(implementation, str) and _num_experts(module) else None


def _num_experts(module: nn.Module) -> int:
    """Return the size of dimension 0 of a module's own 3-D parameters; 0 if it has none."""
    return next((len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 3), 0)


def route_evenly(model: nn.Module) -> None:
    """Wrap the forwards of the "eager" experts in `model`, to route tokens evenly. See [Note: Balanced routing].

    `zeroamp.discovery.fake_run` calls it, and restores the forwards.
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
    """Replaces two results: `nonzero` of a 1-D tensor (the chosen experts), `where` of a 2-D mask (one's tokens)."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._num_wheres = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return fixed results of these two functions, and run all others."""
        name = getattr(func, "__name__", "")
        if name == "nonzero" and len(args) == 1 and not kwargs and args[0].dim() == 1:
            self._num_wheres = 0
            return [[expert] for expert in range(self._num_experts)]
        if name == "where" and len(args) == 1 and not kwargs and args[0].dim() == 2:
            mask: torch.Tensor = args[0]  # [choices of a token, tokens], of one expert
            expert, self._num_wheres = self._num_wheres, self._num_wheres + 1
            num_chosen = mask.numel() // self._num_experts + (expert < mask.numel() % self._num_experts)
            return torch.empty(num_chosen, 2, dtype=torch.long, device=mask.device).unbind(1)
        return func(*args, **(kwargs or {}))
