"""Step hooks and replaced steps of torch's optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step hook is registered, on this optimizer or globally on all optimizers."""
    registers = (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
    return any(map(_has_hooks, (*registers, register_optimizer_step_pre_hook, register_optimizer_step_post_hook)))


def _has_hooks(register: Callable[..., RemovableHandle]) -> bool:
    """Return whether the hooks beside which `register` puts a new one are any."""
    handle: Any = register(_nothing)
    handle.remove()
    return bool(handle.hooks_dict_ref())


def _nothing(*_args: Any) -> None:
    pass


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a `step` of its own, other than the wrapper that torch's schedulers install.

    That wrapper is a function of `torch.optim.lr_scheduler` whose `__wrapped__` is the `step` of the class.
    """
    step = vars(optimizer).get("step")
    is_of_scheduler = getattr(step, "__globals__", None) is vars(lr_scheduler)
    is_scheduled = is_of_scheduler and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not is_scheduled
