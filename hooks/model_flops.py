"""Counts the FLOPs of what runs, but for what activation checkpointing runs a second time."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zeroamp.hooks._fsdp import TorchDispatchMode


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
