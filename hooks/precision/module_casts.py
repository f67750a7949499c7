"""Casts what enters and leaves a module: the inputs of units in modes bf16 and fp16, and fp32 regions in every mode."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks._torch.fsdp import PreForward
from zeroamp.hooks.callers_containers import CallersContainers
from zeroamp.hooks.tensors import Loan, map_arguments, map_tensors
from zeroamp.hooks.unit_hooks import wrap_forward


def cast_inputs(dtype: torch.dtype, containers: CallersContainers) -> PreForward:
    """Return a forward pre-hook, with kwargs, that casts a module's floating-point inputs to `dtype`.

    FSDP2's `cast_forward_inputs` casts to the dtype of the unit's own group, which is fp32 if the unit has fp32
    parameters only. Register the hook after FSDP2's own pre-hook, which moves the root's inputs to the device. The hook
    casts tensors in the same containers as FSDP2 does, dataclasses included, until the end of the forward.
    """
    cast = partial(_cast, dtype)

    @untraced
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return containers.map_arguments(module, cast, args, kwargs)

    return before


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor


def run_in_fp32(module: nn.Module, device_type: str, output_dtype: torch.dtype | None) -> None:
    """Wrap `module.forward`, so that it runs in fp32, with autocast off.

    Floating-point inputs are cast to fp32, at any depth of containers. Floating-point outputs are cast to
    `output_dtype`, if it is given: in the modes bf16 and fp16, the modules around this one raise for fp32 inputs.
    """

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def in_fp32(*args: Any, **kwargs: Any) -> Any:
            loan = Loan()
            args, kwargs = map_arguments(partial(_cast, torch.float32), args, kwargs, loan)
            try:
                with torch.autocast(device_type, enabled=False):
                    output = forward(*args, **kwargs)
            finally:
                loan.end()
            return output if output_dtype is None else map_tensors(partial(_cast, output_dtype), output)

        return in_fp32

    wrap_forward(module, wrap)
