"""Casts what enters and leaves a module: the inputs of units in modes bf16 and fp16, and fp32 regions in every mode."""

import logging
from collections.abc import Callable, Collection
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks._torch.fsdp import PreForward
from zeroamp.hooks.callers_containers import CallersContainers
from zeroamp.hooks.tensors import Loan, map_arguments, map_tensors, may_have_tensors
from zeroamp.hooks.unit_hooks import wrap_forward
from zeroamp.policies.dtypes import short_name

logger = logging.getLogger("zeroamp")


def cast_inputs(
    dtype: torch.dtype,
    containers: CallersContainers,
    forward: Callable[..., Any],
    keeps: Collection[str] = (),
    rounded: "RoundedInputs | None" = None,
) -> PreForward:
    """Return a forward pre-hook, with kwargs, that casts a module's floating-point inputs to `dtype`.

    FSDP2's `cast_forward_inputs` casts to the dtype of the unit's own group, which is fp32 if the unit has fp32
    parameters only. Register the hook after FSDP2's own pre-hook, which moves the root's inputs to the device. The hook
    casts tensors in the same containers as FSDP2 does, dataclasses included, until the end of the forward.

    Args:
        dtype: of the mode.
        containers: of the model. They undo the casts in lists and dicts of the caller.
        forward: the module's forward, or a registered method. Its signature names the positional arguments.
        keeps: names of arguments that are not cast.
        rounded: warns of values that the cast rounds.
    """
    cast, names = partial(_cast, dtype), tuple(signature(forward).parameters)
    kept = [position for position, name in enumerate(names) if name in keeps]

    @untraced
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if rounded is not None and not rounded.has_warned:
            rounded.look(module, dtype, {**dict(zip(names, args, strict=False)), **kwargs}, keeps)
        if not keeps and not may_have_tensors(args, kwargs):
            low_args = [cast(each) if isinstance(each, torch.Tensor) else each for each in args]
            return tuple(low_args), {k: cast(v) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        if not keeps:
            return containers.map_arguments(module, cast, args, kwargs)
        others = {name: value for name, value in kwargs.items() if name not in keeps}
        hidden = tuple(None if position in kept else value for position, value in enumerate(args))
        low, by_name = containers.map_arguments(module, cast, hidden, others)
        low = tuple(args[position] if position in kept else value for position, value in enumerate(low))
        return low, kwargs | by_name

    return before


class RoundedInputs:
    """Warns once per model if a unit's cast rounds an input with one number per sample, such as a diffusion timestep.

    Checks 0-D and 1-D tensors only: hidden states have more dimensions, and are meant to be in low precision. On a CPU
    the values decide. On an accelerator the shape and the dtype decide, because the host would wait for the values.
    """

    def __init__(self) -> None:
        self.has_warned = False

    def look(self, module: nn.Module, dtype: torch.dtype, inputs: dict[str, Any], keeps: Collection[str]) -> None:
        """Log a warning if the cast to `dtype` rounds one of `inputs`, which are by name of the argument."""
        for name, value in inputs.items():
            if not isinstance(value, torch.Tensor) or value.dim() > 1 or name in keeps:
                continue
            if value.dtype not in (torch.float32, torch.float64) or not value.numel() or self.has_warned:
                continue
            example = "998.39 would become 1000"
            if value.device.type == "cpu":
                is_rounded = value.to(dtype).to(value.dtype) != value
                if not is_rounded.any():
                    continue
                number = float(value.detach()[is_rounded].reshape(-1)[0])
                example = f"{number:.6g} becomes {float(torch.tensor(number).to(dtype)):.6g}"
            self.has_warned = True
            logger.warning(
                "The argument %s of a %s, a tensor of shape %s in %s, is cast to %s: %s. To keep it as it is, write "
                '"zeroamp": {"keep_inputs_in_fp32": ["%s"]} in the config.',
                *(name, class_name(module), tuple(value.shape), short_name(value.dtype), short_name(dtype), example),
                name,
            )


def class_name(module: nn.Module) -> str:
    """Return the name of a module's own class, not of the one that FSDP2 makes."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


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
