"""Checks the optimizers that a loop steps itself, and reshards the weights that they updated.

[Note: Optimizer-step hooks]
torch calls two functions around each `step` of each optimizer of the process, which the first `wrap_model` registers.
For an optimizer without parameters of a wrapped model they end after one look-up. For steps of `TrainStep` they end at
once, because `TrainStep` checks and reshards by itself. In other loops:

| before or after `step` | what the loop did | what happens |
|---|---|---|
| before | the optimizer holds parameters that were replaced, unsharded ones, or ones added later | StepError |
| before | it steps an optimizer that `TrainStep` steps too, inside an optimizer step | StepError |
| before | its kind needs whole parameters, or plain tensors (`zeroamp.optimizers.kinds`) | StepError; Muon gets them |
| before | its last backward did not reduce the gradients (`set_requires_gradient_sync`) | StepError |
| before | its last backward did not sum them over replicas (`set_requires_all_reduce`) | StepError |
| before | its loss depends only on tensors that modules have kept | StepError |
| before | no rank used a parameter, whose unit ran | its gradient of zeros becomes None |
| before | ranks reduced gradients in different orders, or have other hyperparameters | see `reduction_order.py` |
| after | a forward with gradients ran between backward and step | the old unsharded weights are released |
| after | it steps inside `torch.autocast` | the cached casts of the old weights are released |

The seventh row needs one all-reduce of a byte per parameter, and the eighth 16 bytes more. On a GPU the host waits for
it only on a rank that did not use a parameter of a unit that ran. Gradients that a closure computes are not looked at.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zeroamp.hooks._torch.dispatch import is_in_backward
from zeroamp.hooks._torch.fsdp import can_be_sharded
from zeroamp.hooks._torch.parameter_group import release_groups
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective
from zeroamp.hooks.group_gradients import GroupGradients, end_backward, refuse_lost_gradients
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.reduction_order import compare_orders, order_bytes
from zeroamp.wrapping.run_alike import PLAIN, Hyperparameters
from zeroamp.wrapping.state import WrapState, wrap_state, wrapped_models
from zeroamp.wrapping.unused_parameters import SentNumbers, discard_unused, numbers_of

ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Element-wise optimizers whose state has the parameter's shape or one element. Subclasses may update differently."""

Kind = Literal["shards", "muon", "DTensors"]
"""`shards`: the optimizer gets this rank's shards as plain tensors. `muon`: `torch.optim.Muon`, whose matrices are
gathered on one rank each. `DTensors`: the optimizer gets the sharded parameters as they are, and torch communicates
where an operation needs it."""


def full_name(optimizer: torch.optim.Optimizer) -> str:
    """Return module and class: several libraries have an optimizer of the same name."""
    return f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"


class OwnedOptimizers:
    """The optimizers that `TrainStep` steps, which the checks of other loops leave alone."""

    is_updating: ClassVar[bool] = False
    """Whether a `TrainStep` of this process steps its optimizers now."""
    _all: ClassVar["WeakSet[torch.optim.Optimizer]"] = WeakSet()

    @classmethod
    def add(cls, optimizer: torch.optim.Optimizer) -> None:
        """Refuse calls of `optimizer.step` inside of an optimizer step, unless they come from `TrainStep`."""
        cls._all.add(optimizer)

    @classmethod
    def has(cls, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a `TrainStep` steps this optimizer."""
        return optimizer in cls._all

    @classmethod
    @contextmanager
    def updating(cls) -> Iterator[None]:
        """Step optimizers inside the context without the checks of this module."""
        cls.is_updating = True
        try:
            yield
        finally:
            cls.is_updating = False
            torch.clear_autocast_cache()  # casts of the old weights


@dataclass(slots=True, kw_only=True)
class _Held:
    """What an optimizer holds of wrapped models. Valid until the optimizer, or the set of wrapped models, changes."""

    found_at: tuple[int, int, int]
    """When it was found: how many parameters the optimizer had, `_Replaced.num_changes`, and how many wrapped models
    there were, without those that are asleep."""
    groups: "list[tuple[ref[nn.Module], tuple[int, ...]]]"
    """(root, positions of the parameter groups in the `WrapState.gradients` of the root). A strong reference to a
    group would keep its model as long as the optimizer."""
    sent: SentNumbers = field(default_factory=lambda: SentNumbers(torch.uint8))
    """The bytes of `_discard_unused`."""


class _Replaced:
    """The parameters that `wrap_model` or `unwrap_model` replaced, and that something still holds."""

    fqns: ClassVar[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
    """Parameter -> its FQN, and the function that replaced it."""
    num_changes: ClassVar[int] = 0
    """How often parameters were replaced."""


_held_by: "WeakKeyDictionary[torch.optim.Optimizer, _Held]" = WeakKeyDictionary()


def parameters_before(model: nn.Module) -> WeakTensorKeyDictionary:
    """Return the FQN of each parameter of a model that is going to be (un)wrapped. Retains no parameter."""
    before = WeakTensorKeyDictionary()
    for fqn, parameter in model.named_parameters():
        before[parameter] = fqn
    return before


def watch_optimizers(model: nn.Module, before: WeakTensorKeyDictionary, call: str = "wrap_model") -> None:
    """Note which parameters were replaced, and check optimizers from now on: [Note: Optimizer-step hooks].

    Call when `model` has its new parameters. `before` is what `parameters_before` returned, and `call` the function
    that replaced them.
    """
    after = {id(parameter) for parameter in model.parameters()}
    for parameter, fqn in before.items():  # type: ignore[no-untyped-call]
        if id(parameter) not in after:
            _Replaced.fqns[parameter] = fqn, call
    if _Replaced.num_changes == 0:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
    _Replaced.num_changes += 1


class _RefusedSteps:
    """A hook of all optimizers: refuses the step of one that holds parameters of a model. Does not retain the model."""

    def __init__(self, model: nn.Module, refuse: Callable[[], None]) -> None:
        self._model = ref(model)
        self._ids = frozenset(map(id, model.parameters()))  # of the sharded ones: a forward may unshard them later
        self._refuse = refuse

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._model() is None:  # the ids may be those of other tensors now
            return False
        return any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"])

    def __call__(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        if self.holds(optimizer):
            self._refuse()


def refuse_steps(model: nn.Module, refuse: Callable[[], None]) -> RemovableHandle:
    """Call `refuse`, which raises, before any optimizer that holds parameters of `model` steps. `remove` ends it.

    `refuse` must not refer to the model: the hook stays if the program drops the model, and does nothing then.
    """
    return register_optimizer_step_pre_hook(_RefusedSteps(model, refuse))


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Check an optimizer, and discard gradients of unused parameters: see [Note: Optimizer-step hooks]."""
    if OwnedOptimizers.is_updating:
        return
    held = _held(optimizer)
    for state, groups in _groups(held):
        name = type(optimizer).__name__
        if (state.step.is_open or state.step.is_scheduled) and OwnedOptimizers.has(optimizer):
            raise StepError(
                f"{name}.step was called in the middle of an optimizer step of TrainStep, which steps this optimizer "
                "itself: the parameters would be updated twice. Remove the calls of optimizer.step() and "
                "optimizer.zero_grad(), and call train.step() after train.backward(loss)."
            )
        if any(group.is_pending for group in groups):
            raise StepError(
                f"{name}.step was called, but the last backward did not reduce the gradients, because it ran with "
                "set_requires_gradient_sync(False). Call model.set_requires_gradient_sync(True) before the last "
                "backward of an optimizer step."
            )
        if any(group.awaits_replicas for group in groups):
            raise StepError(
                f"{name}.step was called, but the last backward did not sum the gradients over replicas, because it "
                "ran with set_requires_all_reduce(False). Call model.set_requires_all_reduce(True) before the last "
                "backward of an optimizer step."
            )
        refuse_lost_gradients(groups, f"{name}.step")
        if not is_in_backward():  # an optimizer of one parameter may step in a hook on its gradient
            _discard_unused(held, state, groups, hyperparameters_of(optimizer.param_groups))


def compare_and_discard(optimizer: torch.optim.Optimizer) -> None:
    """Compare the ranks of each model of an optimizer, and discard gradients that no rank computed, before its step.

    For a `TrainStep` whose all-reduce does not do this.
    """
    held = _held(optimizer)
    for state, groups in _groups(held):
        refuse_lost_gradients(groups, f"{type(optimizer).__name__}.step")
        _discard_unused(held, state, groups, hyperparameters_of(optimizer.param_groups))


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Release unsharded weights, which are older than the update. The next forward unshards the new ones."""
    if OwnedOptimizers.is_updating:
        return
    for _, groups in _groups(_held(optimizer)):
        torch.clear_autocast_cache()  # casts of the old weights
        release_groups([group.group for group in groups])
        end_backward(groups)


def _held(optimizer: torch.optim.Optimizer) -> _Held:
    """Return what an optimizer holds, from the last time if nothing changed since."""
    num_params = sum(len(group["params"]) for group in optimizer.param_groups)
    held, found_at = _held_by.get(optimizer), (num_params, _Replaced.num_changes, len(wrapped_models()))
    if held is None or held.found_at != found_at:
        groups = _find_groups(optimizer)
        if groups and (type(optimizer) not in ELEMENTWISE or type(optimizer) is torch.optim.Rprop):
            from zeroamp.optimizers.kinds import prepare_other

            prepare_other(optimizer, [root for root, _ in groups])
        held = _held_by[optimizer] = _Held(found_at=found_at, groups=groups)
    return held


def _groups(held: _Held) -> Iterator[tuple[WrapState, list[GroupGradients]]]:
    """Yield the state of each wrapped model, and its parameter groups of which the optimizer holds parameters."""
    for reference, positions in held.groups:
        if (root := reference()) is not None:
            state = wrap_state(root)
            yield state, [state.gradients[position] for position in positions]


def _find_groups(optimizer: torch.optim.Optimizer) -> "list[tuple[ref[nn.Module], tuple[int, ...]]]":
    """Return `_Held.groups` of an optimizer.

    Raises:
        StepError: the optimizer holds parameters that no backward gives a gradient.
    """
    roots = wrapped_models()
    owners: dict[int, tuple[int, int]] = {}  # id of a sharded parameter -> positions of its root and of its group
    unsharded: set[int] = set()
    for number, root in enumerate(roots):
        for position, group in enumerate(wrap_state(root).gradients):
            owners |= {id(parameter): (number, position) for parameter in group.parameters}
            unsharded |= {id(leaf) for leaf in group.leaves}
    late = _late_parameters(roots, owners)
    held: dict[int, set[int]] = {}
    for index, param_group in enumerate(optimizer.param_groups):
        where = f"{type(optimizer).__name__}.step was called, but param_groups[{index}] holds"
        for parameter in param_group["params"]:
            if (replaced := _Replaced.fqns.get(parameter)) is not None:  # type: ignore[no-untyped-call]
                fqn, call = replaced
                raise StepError(
                    f"{where} {fqn} as it was before {call}, which replaced it: the step would not train the "
                    f"model. Build the optimizer from model.parameters() after {call}."
                )
            if id(parameter) in unsharded:
                raise StepError(
                    f"{where} an unsharded parameter of shape {tuple(parameter.shape)}, which never has a gradient: "
                    "the optimizer was built between a forward and its backward. Build it from model.parameters() "
                    "after wrap_model and before the first forward."
                )
            if (fqn := late.get(id(parameter))) is not None:
                raise StepError(
                    f"{where} {fqn}, which is not sharded: it was added or replaced after wrap_model, so each rank "
                    "would train its own copy. Add modules and adapters, and resize embeddings, before wrap_model, or "
                    "do not pass this parameter to the optimizer."
                )
            if (owner := owners.get(id(parameter))) is not None:
                held.setdefault(owner[0], set()).add(owner[1])
    return [(ref(roots[number]), tuple(sorted(positions))) for number, positions in held.items()]


def _late_parameters(roots: list[nn.Module], owners: Container[int]) -> dict[int, str]:
    """Return {id: FQN} of the trained parameters of wrapped models that were added or replaced after `wrap_model`.

    `owners` has the ids of the sharded parameters. Left out are 0-D parameters, which `TrainStep` averages, and
    `ignored_params`, which the caller averages.
    """
    return {
        id(parameter): fqn
        for root in roots
        for fqn, parameter in root.named_parameters()
        if id(parameter) not in owners
        and parameter.requires_grad
        and can_be_sharded(parameter)
        and fqn not in wrap_state(root).plan.ignored_fqns
    }


def hyperparameters_of(param_groups: Iterable[Mapping[str, Any]]) -> Hyperparameters:
    """Return the hyperparameters of param groups that are plain values. Those that are tensors are left out."""
    return [
        [(key, value) for key, value in group.items() if type(value) in PLAIN or _is_plain(value)]
        for group in param_groups
    ]


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, PLAIN)


def _discard_unused(
    held: _Held, state: WrapState, groups: list[GroupGradients], hyperparameters: Hyperparameters
) -> None:
    """Set `grad` to None on the parameters of `groups` that no rank used; compare orders and hyperparameters."""
    numbers, unused = numbers_of(groups)
    used: torch.Tensor | bytes = numbers
    if state.axes.whole.size() > 1:
        by_any = held.sent.on_device(state.mesh, numbers + order_bytes(state.issued, hyperparameters)).clone()
        call = IssuedCollective("all_reduce", by_any, STEP, state.world, dist.ReduceOp.MAX)
        issue(lambda: dist.all_reduce(by_any, dist.ReduceOp.MAX, group=state.world), call, state.listeners)
        compare_orders(state, by_any[len(numbers) :], hyperparameters)
        used = by_any[: len(numbers)]
    discard_unused(unused, used)


_hooks_of: "WeakKeyDictionary[torch.optim.Optimizer, tuple[Callable[[], Any], ...]]" = WeakKeyDictionary()
"""Optimizer -> weak references to the dicts of its step hooks and of the global ones."""


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step hook is registered, on this optimizer or globally on all optimizers.

    Hooks of this module do not count, but those of `refuse_steps` count for the optimizers of their model. The dicts in
    which torch has the hooks are found once per optimizer, and again if one was replaced.
    """
    references = _hooks_of.get(optimizer, ())
    dicts = [reference() for reference in references]
    if not dicts or None in dicts:
        own = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        of_all = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        references = _hooks_of[optimizer] = tuple(map(_dict_of, (*own, *of_all)))
        dicts = [reference() for reference in references]
    for hooks in dicts:
        for hook in hooks.values():
            if hook is _before_step or hook is _after_step:
                continue
            if not isinstance(hook, _RefusedSteps) or hook.holds(optimizer):
                return True
    return False


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
