"""The private names of torch's optimizers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step hook is registered, on this optimizer or globally on all optimizers."""
    everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(everywhere or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a `step` of its own, other than the wrapper that torch's schedulers install.

    Schedulers mark their wrapper with `_wrapped_by_lr_sched`. A user's wrapper may copy that attribute, so the wrapper
    must also have `step.__wrapped__ is type(optimizer).step`.
    """
    step = vars(optimizer).get("step")
    is_scheduled = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not is_scheduled


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's kernels read `found_inf` and `grad_scale` on the device, as with `GradScaler`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def guarded(optimizer: Any, found_inf: torch.Tensor, grad_scale: torch.Tensor | None) -> Iterator[None]:
    """Set an optimizer's `found_inf` and `grad_scale` inside the context. Both are 0-D fp32 tensors on the device.

    If `found_inf` is 1, the kernels skip the update. They divide gradients by `grad_scale`, unless it is None.
    """
    optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale
