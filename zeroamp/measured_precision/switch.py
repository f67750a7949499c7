"""Runs each group of modules in fp32 or under the config's autocast, and counts the FLOPs of each group.

The parameters must be all-gathered in fp32. An op under autocast then casts them to the values that an all-gather in
the low dtype gives, and casts their gradients back to fp32, which is exact.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from zeroamp.hooks.observers.tracing import OpRecorder
from zeroamp.hooks.tensors import Loan, map_arguments, map_tensors


class PrecisionSwitch(OpRecorder):  # type: ignore[no-untyped-call]
    """Wraps the forwards of a model's modules while `attached`. As a context, counts FLOPs of forwards by group.

    An fp32 group runs as `keep_in_fp32_modules` runs it: autocast is off, and floating-point inputs are cast to fp32. A
    low group runs under autocast. If an fp32 module called it, its low outputs are cast to fp32, which is exact.
    """

    def __init__(self, group_of: Mapping[nn.Module, str], device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._group_of, self._device_type, self._dtype = group_of, device_type, dtype
        self.low: frozenset[str] = frozenset()
        """The groups that run in low precision."""
        self.flops: Counter[str] = Counter()
        self._running: str | None = None
        """The group of the innermost running module. None outside of forwards, and where a backward recomputes one."""
        self._was_on: dict[nn.Module, bool] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Wrap the forwards, and restore them at the end."""
        before = {module: vars(module).get("forward") for module in self._group_of}
        root, *inner = self._group_of
        handles = [module.register_forward_pre_hook(self._pass_guard, prepend=True) for module in inner]
        for module in (root, *inner):
            module.forward = self._wrapped(module, self._group_of[module])
        try:
            yield
        finally:
            self._running = None
            for handle in handles:
                handle.remove()
            for module, forward in before.items():
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _pass_guard(self, module: nn.Module, _args: Any) -> None:
        """Switch autocast on for the module's other hooks, of which one refuses a forward without autocast."""
        self._was_on[module] = torch.is_autocast_enabled(self._device_type)
        torch.set_autocast_enabled(self._device_type, True)

    def _wrapped(self, module: nn.Module, group: str) -> Callable[..., Any]:
        forward = module.forward

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if (was_on := self._was_on.pop(module, None)) is not None:
                torch.set_autocast_enabled(self._device_type, was_on)
            caller, self._running = self._running, group
            # The caller's group, not autocast's state: the model itself may switch autocast off around a call.
            is_on = torch.is_autocast_enabled(self._device_type) if caller is None else caller in self.low
            try:
                if (group in self.low) == is_on:
                    return forward(*args, **kwargs)
                return self._switched(forward, args, kwargs, is_low=not is_on)
            finally:
                self._running = caller

        return run

    def _switched(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, is_low: bool) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=is_low):
            if is_low:
                return map_tensors(self._to_fp32, forward(*args, **kwargs))
            loan = Loan()
            args, kwargs = map_arguments(partial(self._to_fp32, is_any=True), args, kwargs, loan)
            try:
                return forward(*args, **kwargs)
            finally:
                loan.end()

    def _to_fp32(self, tensor: torch.Tensor, *, is_any: bool = False) -> torch.Tensor:
        is_cast = tensor.is_floating_point() and (is_any or tensor.dtype == self._dtype)
        return tensor.float() if is_cast else tensor

    def see(self, func: Any, arguments: Any, out: Any) -> None:
        """Add the FLOPs of an op to its group, if torch has a formula: for matrix products and convolutions."""
        args, kwargs = arguments
        if self._running is not None and (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops[self._running] += formula(*args, **kwargs, out_val=out)
