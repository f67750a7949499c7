"""Casts buffers where the config asks for it: no precision mode does by itself."""

import torch
from torch import nn

from zeroamp.plan import Plan


def cast_buffers(model: nn.Module, plan: Plan) -> None:
    """Cast floating-point buffers to `data_types.buffer_dtype`, but those that `keep_in_fp32_modules` names.

    A buffer that two modules share stays shared.
    """
    dtype = plan.policy.buffer_dtype
    if dtype is None:
        return
    cast: dict[int, torch.Tensor] = {}
    for fqn, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{fqn}.{name}" if fqn else name
            if buffer.is_floating_point() and plan.fp32_regions.pattern_of(full_name) is None:
                module._buffers[name] = cast.setdefault(id(buffer), buffer.to(dtype))
