"""FSDP2's methods on the root and the units of a wrapped model, for loops and libraries that call them.

[Note: FSDP2's methods]
A method of an `FSDPModule` applies to the module's own parameter group. A unit of zeroamp may have several: its own,
typed groups, and a part of the model-wide group (see `zeroamp.planning.groups`). So `wrap_model` sets methods on the
units that apply to all groups of the unit. Those of the root also apply to the embeddings and heads that are units of
their own, because FSDP2 would leave these to the root. The model-wide group has parameters of several units:

| method | the model-wide group |
|---|---|
| `_ON_IF_ANY` | is on if it is on for one of the units. Reducing more often than a unit needs changes no sum |
| `set_gradient_divide_factor` | gets the factor if the units have the same one. Otherwise its next reduction raises |
| `unshard` | is unsharded with each of the units |
| `set_unshard_in_backward` | is always unsharded in the backward |
| other setters, and `reshard` | follows the root |

Where zeroamp sums the replicas of HSDP, `set_force_sum_reduction_for_comms` has no effect: zeroamp's reductions only
sum, and FSDP2 would divide a second time.

torch's pipeline schedules call `set_reshard_after_backward(False)`, then `set_requires_gradient_sync(False)`, before
each backward. The second call prepares that backward: see `zeroamp/hooks/backward_by_parts.py`.

Methods that would replace the collectives of zeroamp, or their memory, raise. `TrainStep` sets four flags itself for
each micro-batch. If a caller has changed one of these flags, `TrainStep.backward` raises.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from zeroamp.hooks import backward_by_parts
from zeroamp.hooks._torch.fsdp import are_replicas_left, discard_unsharded_gradients, divide_factor, units_of
from zeroamp.hooks.group_gradients import by_module, reset_gradients
from zeroamp.policies.errors import StepError, WrapError
from zeroamp.wrapping.refused_calls import replace_method
from zeroamp.wrapping.shard import group_modules, prefetch_in_backward, prefetch_in_forward
from zeroamp.wrapping.state import WrapState

_GRADIENT_SYNC, _RESHARD_AFTER_BACKWARD = "set_requires_gradient_sync", "set_reshard_after_backward"
_FORCE_SUM = "set_force_sum_reduction_for_comms"
MANUAL_END = "set_manual_backward_finalization"  # from torch 2.15 on
_ON_IF_ANY = (_GRADIENT_SYNC, "set_requires_all_reduce", _FORCE_SUM)
_FACTOR, _UNSHARD_IN_BACKWARD = "set_gradient_divide_factor", "set_unshard_in_backward"
_SETTERS = (
    *_ON_IF_ANY,
    _FACTOR,
    _UNSHARD_IN_BACKWARD,
    _RESHARD_AFTER_BACKWARD,
    *("set_reshard_after_forward", "set_is_last_backward"),
    *("set_reduce_scatter_unused_params", "set_reduce_scatter_max_input_buffers", "set_keep_unsharded_storage"),
)
"""The setters that apply to all groups of a unit. `set_reduce_scatter_divide_factor` calls one of them. A unit may run
`set_separate_reduce_scatter_group` as it is: the order in which groups get a process group does not matter."""

_BY_TRAIN_STEP = {
    _GRADIENT_SYNC: "pass is_last to train.backward, or set gradient_accumulation_steps",
    "set_requires_all_reduce": "replicas are summed once per optimizer step at stages 2 and 3",
    "set_is_last_backward": "pass is_last to train.backward, or set gradient_accumulation_steps",
    _RESHARD_AFTER_BACKWARD: "stages 0 to 2 leave parameters unsharded between micro-batches",
    MANUAL_END: "each of its backwards completes its own reductions",
}
"""Flag that `TrainStep` sets -> what to write instead, or what `TrainStep` does."""

_COLLECTIVES = "It would replace zeroamp's {}. Remove the call. To choose dtypes, use keys of the config: {}"
_REFUSED = {
    "set_custom_all_gather": _COLLECTIVES.format("all-gather", "bf16, fp16, torch_autocast, zeroamp.overrides."),
    "set_custom_reduce_scatter": _COLLECTIVES.format(
        "reduction", "communication_data_type, zeroamp.reduce_accumulate_dtype."
    ),
    "set_all_reduce_hook": (
        "It would replace zeroamp's hook, which sums over replicas. Change parameter.grad after the backward, or in a "
        "hook of parameter.register_post_accumulate_grad_hook, which runs after each reduction."
    ),
    "set_allocate_memory_from_process_group_for_comm": (
        "FSDP2 refuses it beside custom collectives, which zeroamp installs. Remove the call."
    ),
    "set_symm_mem_for_comm": "FSDP2 refuses it beside custom collectives, which zeroamp installs. Remove the call.",
}
"""Method -> why it raises, and what to do instead."""


class FsdpMethods:
    """The methods of one model: see [Note: FSDP2's methods]."""

    def __init__(self, state: WrapState) -> None:
        self._state = state
        by_unit = group_modules(state.root, state.plan, state.holders)
        self._prefetched = {state.units[unit]: modules for unit, modules in by_unit.items()}
        self._model_wide: dict[FSDPModule, set[nn.Module]] = {
            state.holders[group.name]: {state.units[param.unit] for param in group.params}
            for group in state.plan.groups
            if group.kind == "model-wide"
        }
        self._own = {
            unit: [module for module in modules if module not in self._model_wide]
            for unit, modules in self._prefetched.items()
        }
        self._of_root = [state.units[unit] for unit in state.plan.own_units]
        self._exchanged = {module for module in units_of(state.root) if are_replicas_left(module)}
        self._values: dict[str, dict[nn.Module, Any]] = {}
        """Setter -> unit -> the value that the caller set."""
        self._factors = {holder: divide_factor(holder) for holder in self._model_wide}
        self._reductions: dict[FSDPModule, Callable[..., Any]] = {}
        """Model-wide group whose reduction raises -> its `post_backward_of_fsdp`."""

    def attach(self) -> None:
        """Set the methods on the units, and those that raise on the group holders too."""
        for module in units_of(self._state.root):
            for name, text in _REFUSED.items():
                replace_method(module, name, partial(_refusing, name, text))
        for unit in self._own:
            for name in _SETTERS:
                replace_method(unit, name, partial(self._setter, unit))
            made_by: dict[str, Callable[..., Any]] = {
                "unshard": self._unshard,
                "reshard": self._reshard,
                "set_modules_to_forward_prefetch": partial(self._prefetch, prefetch_in_forward),
                "set_modules_to_backward_prefetch": partial(self._prefetch, prefetch_in_backward),
            }
            for name, make in made_by.items():
                replace_method(unit, name, partial(make, unit))
        for module in self._exchanged - self._own.keys():
            replace_method(module, _FORCE_SUM, lambda _method: _no_effect)
        replace_method(self._state.root, "reset_iter_state", self._reset_iter_state)
        replace_method(self._state.root, MANUAL_END, self._set_manual_end)

    def _setter(self, unit: nn.Module, method: Callable[..., None]) -> Callable[..., None]:
        name, parameters = method.__name__, signature(method)
        of_class, has_recurse = getattr(FSDPModule, name), "recurse" in parameters.parameters

        own_only = {"recurse": False} if has_recurse else {}

        def set_on(module: FSDPModule, value: Any) -> None:
            if name != _FORCE_SUM or module not in self._exchanged:
                of_class(module, value, **own_only)

        @wraps(method)
        def set_value(*args: Any, **kwargs: Any) -> None:
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            is_recursive = bound.arguments.pop("recurse", False)
            (value,) = bound.arguments.values()
            inside = [each for each in unit.modules() if each in self._own] if is_recursive else self._alone(unit)
            for each in inside:
                for module in self._own[each]:
                    set_on(module, value)
                self._values.setdefault(name, {})[each] = value
            for holder, owners in self._model_wide.items():
                if name in _ON_IF_ANY:
                    default = name != _FORCE_SUM
                    is_on = any(self._values[name].get(owner, default) for owner in owners)
                    set_on(holder, is_on)
                elif name == _FACTOR:
                    self._set_factor(holder, owners)
                elif name != _UNSHARD_IN_BACKWARD and self._state.root in inside:
                    set_on(holder, value)
            self._note(name)
            if name == _GRADIENT_SYNC and not value and unit is self._state.root and self._stays_unsharded():
                self._state.step.refuse_unfinished("schedule.step")
                backward_by_parts.prepare(self._state.gradients)

        return set_value

    def _stays_unsharded(self) -> bool:
        """Return whether the caller leaves the root unsharded after backwards, as pipeline schedules do."""
        return self._values.get(_RESHARD_AFTER_BACKWARD, {}).get(self._state.root) is False

    def _alone(self, unit: nn.Module) -> list[nn.Module]:
        """Return the units to which a method of `unit` that is not recursive applies."""
        return [unit, *self._of_root] if unit is self._state.root else [unit]

    def _set_factor(self, holder: FSDPModule, owners: Container[nn.Module]) -> None:
        """Give a model-wide group the factor of the units that have parameters in it, or let its reduction raise."""
        gradients = by_module(self._state.gradients)[holder]
        if holder in self._reductions:
            gradients.post_backward_of_fsdp = self._reductions.pop(holder)
        by_factor: dict[float | None, str] = {}  # factor -> a unit
        for fqn, unit in self._state.units.items():
            if unit in owners:
                by_factor.setdefault(self._values[_FACTOR].get(unit, self._factors[holder]), fqn or "the root")
        if len(by_factor) == 1:
            FSDPModule.set_gradient_divide_factor(holder, cast(float, next(iter(by_factor))))  # None is its default
            return
        (factor, first), (other_factor, other) = list(by_factor.items())[:2]
        text = (
            f"set_gradient_divide_factor: {first} divides its gradients by {factor}, but {other} by {other_factor} "
            "(None: the number of ranks). Small fp32 parameters of both are reduced in one group. "
            'Set one factor for all FSDPModules of model.modules(), or "zero_optimization": '
            '{"stage3_param_persistence_threshold": 0}, which reduces them with their units.'
        )
        self._reductions[holder] = gradients.post_backward_of_fsdp
        gradients.post_backward_of_fsdp = partial(_raise, text)

    def _note(self, name: str) -> None:
        """Note whether a flag that `TrainStep` sets, or a factor, is not as `wrap_model` left it."""
        changed = name == MANUAL_END  # the other flags are on by default
        if name == _FACTOR or (name in _BY_TRAIN_STEP and changed in self._values[name].values()):
            self._state.set_by_caller[name] = _BY_TRAIN_STEP.get(name, "")
        else:
            self._state.set_by_caller.pop(name, None)

    def _unshard(self, unit: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        units = self._alone(unit)
        shared = [
            holder for holder, owners in self._model_wide.items() if owners & {*units} or unit is self._state.root
        ]
        modules = [*(module for each in units for module in self._own[each]), *shared]

        @wraps(method)
        def unshard(async_op: bool = False) -> UnshardHandle | None:
            handles = [FSDPModule.unshard(module, async_op) for module in modules]
            return _Handles([each for each in handles if each is not None]) if async_op else None

        return unshard

    def _reshard(self, unit: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        modules = [module for each in self._alone(unit) for module in self._prefetched[each]]

        @wraps(method)
        def reshard() -> None:
            for module in modules:
                FSDPModule.reshard(module)

        return reshard

    def _groups_of(self, modules: Iterable[FSDPModule]) -> list[list[FSDPModule]]:
        return [self._prefetched.get(cast(nn.Module, module), [module]) for module in modules]

    def _prefetch(
        self, prefetch: Callable[..., None], unit: nn.Module, method: Callable[..., Any]
    ) -> Callable[..., Any]:
        @wraps(method)
        def set_modules(modules: list[FSDPModule]) -> None:
            prefetch(self._prefetched[unit], self._groups_of(modules))

        return set_modules

    def _set_manual_end(self, method: Callable[[bool], None]) -> Callable[[bool], None]:
        @wraps(method)
        def set_manual_end(enabled: bool) -> None:
            method(enabled)
            self._values[MANUAL_END] = {self._state.root: bool(enabled)}
            self._note(MANUAL_END)

        return set_manual_end

    def _reset_iter_state(self, method: Callable[[], None]) -> Callable[[], None]:
        @wraps(method)
        def reset() -> None:
            self._state.root_forward.reset()
            method()
            reset_gradients(self._state.gradients)
            discard_unsharded_gradients(units_of(self._state.root))  # FSDP2 leaves those that were not reduced

        return reset


class _Handles(UnshardHandle):
    """Waits for the all-gathers of several groups."""

    def __init__(self, handles: Sequence[UnshardHandle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


def _no_effect(enable: bool) -> None:
    """Take the place of `set_force_sum_reduction_for_comms`."""


def _refusing(name: str, text: str, _method: Callable[..., Any]) -> Callable[..., Any]:
    return partial(_raise_wrap_error, f"{name} was called on a wrapped model. {text}")


def _raise_wrap_error(text: str, *_args: Any, **_kwargs: Any) -> Any:
    raise WrapError(text)


def _raise(text: str, *_args: Any) -> Any:
    raise StepError(text)
