"""Runs each group of modules in fp32 or under the config's autocast, and counts the FLOPs of each group.

The parameters must be all-gathered in fp32. An op under autocast then casts them to the values that an all-gather in
the low dtype gives, and casts their gradients back to fp32, which is exact.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from zeroamp.hooks.module_changes import ModuleChanges
from zeroamp.hooks.observers.tracing import OpRecorder
from zeroamp.hooks.precision.module_casts import run_in_fp32
from zeroamp.hooks.tensors import map_tensors
from zeroamp.hooks.unit_hooks import wrap_forward


class PrecisionSwitch(OpRecorder):  # type: ignore[no-untyped-call]
    """Wraps the forwards of a model's modules while `attached`. As a context, counts FLOPs of forwards by group.

    An fp32 group runs as `keep_in_fp32_modules` runs it. A low group runs under autocast. If an fp32 module called it,
    its low outputs are cast to fp32, which is exact.
    """

    def __init__(self, group_of: Mapping[nn.Module, str], device_type: str, dtype: torch.dtype) -> None:
        """`group_of`: each module that runs -> the name of its group, the root first. `dtype`: the low precision."""
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
        changes = ModuleChanges()
        with changes.noting(self._group_of):
            for module in list(self._group_of)[1:]:  # the root enters the config's autocast before its other hooks
                module.register_forward_pre_hook(self._pass_guard, prepend=True)
            for module, group in self._group_of.items():
                self._wrap(module, group)
        try:
            yield
        finally:
            self._running = None
            changes.undo()

    def _pass_guard(self, module: nn.Module, _args: Any) -> None:
        """Switch autocast on for the module's other hooks, of which one refuses a forward without autocast."""
        self._was_on[module] = torch.is_autocast_enabled(self._device_type)
        torch.set_autocast_enabled(self._device_type, True)

    def _wrap(self, module: nn.Module, group: str) -> None:
        forward = module.forward
        run_in_fp32(module, self._device_type, None)
        in_fp32 = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if (was_on := self._was_on.pop(module, None)) is not None:
                torch.set_autocast_enabled(self._device_type, was_on)
            caller, self._running = self._running, group
            # The caller's group, not autocast's state: the model itself may switch autocast off around a call.
            is_on = torch.is_autocast_enabled(self._device_type) if caller is None else caller in self.low
            try:
                if (group in self.low) == is_on:
                    return forward(*args, **kwargs)
                if is_on:
                    return in_fp32(*args, **kwargs)
                with torch.autocast(self._device_type, dtype=self._dtype):
                    return map_tensors(self._to_fp32, forward(*args, **kwargs))
            finally:
                self._running = caller

        wrap_forward(module, lambda _in_fp32: run)

    def _to_fp32(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == self._dtype else tensor

    def see(self, func: Any, arguments: Any, out: Any) -> None:
        """Add the FLOPs of an op to its group, if torch has a formula: for matrix products and convolutions."""
        args, kwargs = arguments
        if self._running is not None and (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops[self._running] += formula(*args, **kwargs, out_val=out)
