"""`deepspeed.utils`: whole and local tensors of sharded parameters, logging, and other names that scripts import."""

from collections.abc import Callable, Iterable, Sequence
from logging import INFO, getLogger  # not the module: the submodule `utils.logging` has its name
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.deepspeed.data_loaders import RepeatingLoader as RepeatingLoader
from zeroamp.deepspeed.refused import missing
from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import StepError, describe
from zeroamp.weights.full_tensors import (
    full_gradient,
    full_optimizer_state,
    full_parameter,
    owner_of,
    set_full_gradient,
    set_full_optimizer_state,
    set_full_parameter,
)
from zeroamp.wrapping.state import WrapState
from zeroamp.wrapping.step_state import Phase

__path__: list[str] = []  # a package: `submodules` imports `utils.timer` and others

logger = getLogger("zeroamp.deepspeed")
"""For the script's messages: as in DeepSpeed, they are printed on every rank that logs them."""

LEAF = "_z3_leaf"
"""Attribute that marks a module as one unit without units inside."""


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message on the given ranks. None or -1: on all ranks."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks or rank == -1:
        logger.log(level, "[Rank %d] %s", rank, message)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the whole fp32 parameter; None if it is frozen. All ranks call it."""
    return full_parameter(param) if param.requires_grad else None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole parameter, between two optimizer steps. All ranks call it; the first rank's value is used."""
    set_full_parameter(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the whole averaged gradient, without the loss scale; None without gradient. All ranks call it.

    Call it after the last backward of an optimizer step and before `engine.step()`.
    """
    return full_gradient(param) if param.requires_grad else None


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole gradient, when `safe_get_full_grad` returns one. All ranks call it; the first rank's is used."""
    set_full_gradient(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of a whole state tensor, such as "exp_avg"; None for a parameter without state. All ranks call it.

    Raises:
        StepError: the parameter has optimizer state, but no tensor of this key.
    """
    optimizer = _optimizer_of(param)
    if optimizer is None:
        return None
    return full_optimizer_state(optimizer, param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a whole state tensor, such as "exp_avg", between two steps. All ranks call it; the first's value is used."""
    optimizer = _optimizer_of(param)
    if optimizer is None:
        raise _no_state(param)
    set_full_optimizer_state(optimizer, param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Set each whole gradient to `update_func(gradient, param)`. All ranks call it."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's shard, in the shape of FSDP2's shards; None if the parameter is frozen."""
    return local_part(owner_of(param)[1].detach()).clone() if param.requires_grad else None


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's shard."""
    _copy(owner_of(param)[1], value, "safe_set_local_fp32_param")


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's shard of the gradient, without the loss scale; None without gradient."""
    gradient, scale = _local_grad(param, "safe_get_local_grad")
    return None if gradient is None else gradient / scale if scale != 1.0 else gradient.clone()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's shard of the gradient, when `safe_get_local_grad` returns one."""
    gradient, scale = _local_grad(param, "safe_set_local_grad")
    if gradient is None:
        raise StepError(
            f"safe_set_local_grad was given a parameter of shape {tuple(param.shape)} without a gradient. Call it "
            "after the last backward of an optimizer step."
        )
    _copy(gradient, value * scale if scale != 1.0 else value, "safe_set_local_grad")


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's shard of a state tensor, such as "exp_avg"; None if there is none."""
    entry = _local_state(param, optim_state_key)
    return None if entry is None else local_part(entry).clone()


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's shard of a state tensor, such as "exp_avg"."""
    entry = _local_state(param, optim_state_key)
    if entry is None:
        raise _no_state(param)
    _copy(entry, value, "safe_set_local_optimizer_state")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given by class or by name, and return them. Call it before `initialize`.

    `initialize` then makes each of them one unit, without units inside.

    Raises:
        StepError: no module is of such a class, and `raise_if_not_found` is True.
    """
    found = [
        module
        for module in model.modules()
        if any(
            each in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")
            if isinstance(each, str)
            else isinstance(module, each)
            for each in leaf_module_classes
        )
    ]
    if not found and raise_if_not_found:
        names = ", ".join(each if isinstance(each, str) else each.__name__ for each in leaf_module_classes)
        raise StepError(
            f"set_z3_leaf_modules found no module of {names} in {type(model).__name__}. Pass classes of its modules."
        )
    for module in found:
        setattr(module, LEAF, True)
    return found


def leaf_names(model: nn.Module) -> list[str]:
    """Return the FQNs of the modules that `set_z3_leaf_modules` has marked."""
    return [fqn for fqn, module in model.named_modules() if getattr(module, LEAF, False)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether `set_z3_leaf_modules` has marked this module."""
    return bool(getattr(model, LEAF, False))


class OnDevice:
    """A context that builds parameters on a device, such as "meta", and in a dtype."""

    def __init__(self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True):
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._before: torch.dtype | None = None

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype or self._before)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged. `zeroamp.Profile` labels the parts of a step in traces."""
    return function


def _optimizer_of(param: nn.Parameter) -> torch.optim.Optimizer | None:
    """Return the optimizer that has state of a parameter, of all engines; None if there is none."""
    from zeroamp.deepspeed.engine import engines

    state, sharded = owner_of(param)
    for engine in engines:
        optimizer = engine.train_step.optimizers[0] if engine.train_step is not None else None
        if engine.module is state.root and optimizer is not None and optimizer.state.get(sharded):
            return optimizer
    return None


def _no_state(param: nn.Parameter) -> StepError:
    return StepError(
        f"A parameter of shape {tuple(param.shape)} has no optimizer state to set. An optimizer creates its state in "
        "its first step, for parameters with a gradient."
    )


def _local_state(param: nn.Parameter, key: str) -> torch.Tensor | None:
    optimizer = _optimizer_of(param)
    entry = None if optimizer is None else optimizer.state[owner_of(param)[1]].get(key)
    return entry if isinstance(entry, torch.Tensor) else None


def _local_grad(param: nn.Parameter, method: str) -> tuple[torch.Tensor | None, float]:
    """Return this rank's shard of the gradient, not a copy, and its loss scale. Errors name `method`."""
    state, sharded = owner_of(param)
    scale = _complete(state, method)
    gradient = sharded.grad
    return (None if gradient is None else local_part(gradient)), scale


def _complete(state: WrapState, method: str) -> float:
    if state.step.phase is Phase.OPEN:
        raise StepError(
            f"{method} was called before the last micro-batch of an optimizer step, when gradients are not complete. "
            "Call it after the last backward and before engine.step()."
        )
    if state.step.shard_accumulator is not None:
        state.step.shard_accumulator.flush()
    return state.step.gradient_scale


@torch.no_grad()
def _copy(target: torch.Tensor, value: torch.Tensor, method: str) -> None:
    local = local_part(target)
    if value.shape != local.shape:
        found, valid = f"of shape {tuple(value.shape)}", f"of this rank's shard, {tuple(local.shape)}"
        raise StepError(describe(f"{method}(value=)", found, valid, "Pass what the getter returns."))
    local.copy_(value)


def __getattr__(name: str) -> Any:
    return missing(__name__, name, (each for each in globals() if each.startswith(("safe", "set", "log", "Rep", "On"))))
