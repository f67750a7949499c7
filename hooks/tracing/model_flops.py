"""Counts the FLOPs of what runs, but for what activation checkpointing runs a second time."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from zeroamp.hooks._torch.dispatch import TorchDispatchMode
from zeroamp.hooks.tensors import tensors_in
from zeroamp.hooks.tracing.fake_run import Replacements, tensors_replaced
from zeroamp.hooks.tracing.recorded_run import replacement, run_context


class ModelFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up torch's own formulas (`torch.utils.flop_counter`) for the ops inside. Returns what they return.

    `FlopCounterMode` would count what is recomputed as well. Recomputation records a graph; a backward does not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.is_in_backward = False
        """Set by the caller."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and not (self.is_in_backward and torch.is_grad_enabled()):
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out


def flops_of_run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of a forward and a backward of the first output that has one, on fake tensors of the CPU.

    The model is left as it was.
    """
    replacements = Replacements(lambda tensor: replacement(tensor, tensor.dtype, "cpu", fake=True))
    with run_context("cpu", fake=True), torch.enable_grad(), tensors_replaced(model, replacements):
        args, kwargs = replacements.of(tuple(args)), replacements.of(dict(kwargs))
        # Plain products: of fused attention on the CPU torch has no formula, and others' compute scores twice.
        with sdpa_kernel(SDPBackend.MATH), ModelFlops() as counter:
            roots = [tensor for tensor in tensors_in(model(*args, **kwargs)) if tensor.requires_grad][:1]
            counter.is_in_backward = True
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return int(counter.total)
