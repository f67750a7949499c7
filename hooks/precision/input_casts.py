"""Casts the floating-point inputs of a unit to the dtype of the modes bf16 and fp16.

FSDP2's `cast_forward_inputs` casts to the dtype of the unit's own group, which is fp32 if the unit has fp32 parameters
only.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks._torch.fsdp import PreForward, map_tensors


def cast_inputs(dtype: torch.dtype) -> PreForward:
    """Return a forward pre-hook, with kwargs, that casts a module's floating-point inputs to `dtype`.

    Register the hook after FSDP2's own pre-hook, which moves the root's inputs to the device. The hook casts tensors in
    the same containers as FSDP2 does, dataclasses included.
    """
    in_container = partial(_cast, dtype)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # most inputs are tensors, which need no walk through containers
            return _cast(dtype, value)
        return value if value is None else map_tensors(in_container, value)

    @untraced
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    return before


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor
