"""The private names of torch's optimizers."""

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
