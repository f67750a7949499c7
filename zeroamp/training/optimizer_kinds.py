"""Decides how an optimizer is updated: on shards, with whole matrices, or on DTensors.

Only torch's element-wise optimizers are known here. `zeroamp.optimizers.kinds` is imported for any other class.

docs/optimizers.md has a table of optimizers.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zeroamp.policies.errors import StepError
from zeroamp.wrapping.optimizer_hooks import ELEMENTWISE, concerns

Kind = Literal["shards", "muon", "DTensors"]
"""`shards`: the optimizer gets this rank's shards as plain tensors. `muon`: `torch.optim.Muon`, whose matrices are
gathered on one rank each. `DTensors`: the optimizer gets the sharded parameters as they are, and torch communicates
where an operation needs it."""


def kind_of(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> Kind:
    """Return how an optimizer is updated. `on_shards`: the caller states that the optimizer is element-wise."""
    if on_shards or type(optimizer) in ELEMENTWISE:
        return "shards"
    from zeroamp.optimizers.kinds import kind_of_other

    return kind_of_other(optimizer)


def checked_on_shards(on_shards: bool | Sequence[bool], num_optimizers: int) -> tuple[bool, ...]:
    """Return one value per optimizer.

    Raises:
        StepError: `on_shards` is neither a bool nor one bool per optimizer.
    """
    values = (on_shards,) * num_optimizers if isinstance(on_shards, bool) else on_shards
    if not isinstance(values, Sequence) or [type(value) for value in values] != [bool] * num_optimizers:
        raise StepError(
            f"TrainStep(on_shards=) must be True, False, or a list of one bool for each of the {num_optimizers} "
            f"optimizers, but is {on_shards!r}."
        )
    return tuple(values)


def refuse_unsupported(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
    """Raise StepError for an optimizer that would fail on sharded parameters, or update them wrongly."""
    if type(optimizer) not in ELEMENTWISE:
        from zeroamp.optimizers.kinds import refuse_other

        refuse_other(optimizer, on_shards=on_shards)


def shard_loaded_state(optimizer: torch.optim.Optimizer, root: nn.Module) -> None:
    """Shard the whole tensors of an optimizer's state, now and at each later `load_state_dict`.

    They come from a run without zeroamp. Call it while the parameters of `root`, the wrapped model, are sharded.

    Raises:
        StepError: a tensor does not fit its parameter.
    """
    names = {id(parameter): fqn for fqn, parameter in root.named_parameters()}

    def before_load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> Any:
        from zeroamp.optimizers.loaded_state import shard_state_dict

        return shard_state_dict(optimizer, state_dict, names)

    if optimizer.state:
        from zeroamp.optimizers.loaded_state import shard_state

        shard_state(optimizer, names)
    with suppress(AttributeError):  # a wrapper that does not call `Optimizer.__init__` has no hooks
        optimizer.register_load_state_dict_pre_hook(before_load)


def full_name(optimizer: torch.optim.Optimizer) -> str:
    """Return module and class: several libraries have an optimizer of the same name."""
    return f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"


_hooks_of: "WeakKeyDictionary[torch.optim.Optimizer, tuple[Callable[[], Any], ...]]" = WeakKeyDictionary()
"""Optimizer -> weak references to the dicts of its step hooks and of the global ones."""


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step hook is registered, on this optimizer or globally on all optimizers.

    Hooks of `wrap_model` do not count. The dicts in which torch has the hooks are found once per optimizer, and again
    if one was replaced.
    """
    references = _hooks_of.get(optimizer, ())
    dicts = [reference() for reference in references]
    if not dicts or None in dicts:
        own = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        of_all = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        references = _hooks_of[optimizer] = tuple(map(_dict_of, (*own, *of_all)))
        dicts = [reference() for reference in references]
    return any(concerns(hook, optimizer) for hooks in dicts for hook in hooks.values())


def _dict_of(register: Callable[..., RemovableHandle]) -> Callable[[], Any]:
    """Return a weak reference to the dict to which `register` adds a hook."""
    handle: Any = register(_nothing)
    handle.remove()
    reference: Callable[[], Any] = handle.hooks_dict_ref
    return reference


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
