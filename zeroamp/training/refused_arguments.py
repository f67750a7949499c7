"""Checks the arguments of `TrainStep` and its methods: optimizers, schedulers, parameters, losses, norms."""

import math
from collections.abc import Iterable, Sequence
from inspect import Parameter, signature
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import can_be_sharded, divide_factors, parameter_pairs
from zeroamp.policies.errors import StepError, describe, repr_on_all_ranks
from zeroamp.policies.numbers import counted
from zeroamp.wrapping.fsdp_methods import MANUAL_END
from zeroamp.wrapping.state import WrapState, wrap_state


class Scheduler(Protocol):
    """The interface of a learning-rate scheduler that `TrainStep` calls."""

    def step(self) -> Any:
        """Move to the next optimizer step's learning rate."""


@runtime_checkable
class StatefulScheduler(Scheduler, Protocol):
    """A scheduler whose state a checkpoint saves and restores."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def checked_optimizers(optimizer: object) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that `TrainStep` was given, or raise StepError if they are something else."""
    given = tuple(optimizer) if isinstance(optimizer, Iterable) and not isinstance(optimizer, str) else (optimizer,)
    for each in given:
        if isinstance(each, type) or not hasattr(each, "param_groups"):
            raise StepError(
                f"TrainStep(optimizer=) must be an optimizer of torch, or several of them, but is {_found(each)}. "
                "Build one after wrap_model, such as torch.optim.AdamW(model.parameters())."
            )
    return given


def checked_schedulers(scheduler: object) -> tuple[Scheduler | None, ...]:
    """Return the schedulers that `TrainStep` was given, () for None, or raise StepError if one has no `step`."""
    if scheduler is None:
        return ()
    given = tuple(scheduler) if isinstance(scheduler, Sequence) and not isinstance(scheduler, str) else (scheduler,)
    for each in given:
        if each is not None and (isinstance(each, type) or not callable(getattr(each, "step", None))):
            raise StepError(
                f"TrainStep(scheduler=) must be a scheduler with a step(), or several of them, but is {_found(each)}. "
                "Build one, such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)."
            )
    return given


def _found(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else repr_on_all_ranks(value)


def _refuse_schedulers(schedulers: Sequence[Scheduler | None], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise StepError unless there is one entry per optimizer. Refuse ReduceLROnPlateau, whose step needs a metric."""
    if len(schedulers) != len(optimizers):
        found = f"{counted(len(schedulers), 'scheduler')} for {counted(len(optimizers), 'optimizer')}"
        raise StepError(
            f"TrainStep(scheduler=) was given {found}. Pass one per optimizer, and None for an optimizer without one."
        )
    if any(isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) for scheduler in schedulers):
        raise StepError(
            "TrainStep(scheduler=) was given ReduceLROnPlateau, whose step needs a metric. Leave it out here, and "
            "call its step(metric) after each evaluation."
        )


def refuse_unusable(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Scheduler | None],
    root: nn.Module,
    parameters: list[nn.Parameter],
) -> None:
    """Raise StepError for optimizers and schedulers that `TrainStep` cannot use."""
    if not optimizers:
        raise StepError("TrainStep was given no optimizer. Pass one that holds parameters of the wrapped model.")
    _refuse_schedulers(schedulers, optimizers)
    refuse_meta(root)
    refuse_unsharded(root)
    refuse_foreign(optimizers, parameters)
    refuse_closures(optimizers)


def refuse_meta(root: nn.Module) -> None:
    """Raise StepError if a parameter is still on the meta device, after `wrap_model(..., materialize=False)`."""
    for fqn, parameter in root.named_parameters():
        if parameter.is_meta:
            raise StepError(
                f"{fqn} is on the meta device, as wrap_model(..., materialize=False) left it. Call "
                "model.to_empty(device=...) and initialise the model before the optimizer is built."
            )


def refuse_unsharded(root: nn.Module) -> None:
    """Raise StepError for a trainable parameter that FSDP2 does not shard: it was added or replaced after `wrap_model`.

    Each rank would train its own copy. Not refused are 0-D parameters, which are replicated; parameters without
    elements, which need no reduction; and `ignored_params`, which the caller reduces. Call this with all groups
    resharded.
    """
    ignored = wrap_state(root).plan.ignored_fqns
    sharded = {id(parameter) for parameter, _ in parameter_pairs(root)}
    for fqn, parameter in root.named_parameters():
        is_missed = parameter.requires_grad and can_be_sharded(parameter) and id(parameter) not in sharded
        if is_missed and fqn not in ignored:
            raise StepError(
                f"{fqn} is trainable, but not sharded: it was added or replaced after wrap_model, so each rank would "
                "train its own copy. Add modules and adapters, and resize embeddings, before wrap_model, or freeze it "
                "with requires_grad_(False)."
            )


def refuse_different_factors(root: nn.Module) -> None:
    """Raise StepError if groups divide their gradients by different factors."""
    # Groups of experts span fewer ranks than the data axes. Their factor is set to the number of all data ranks.
    num_ranks = wrap_state(root).mesh.size()
    factors = {name: None if factor == num_ranks else factor for name, factor in divide_factors(root)}
    first = next(iter(factors), "")
    for name, factor in factors.items():
        if factor != factors[first]:
            raise StepError(
                f"set_gradient_divide_factor: {name} divides its gradients by {factor}, but {first} by "
                f"{factors[first]} (None: the number of ranks). Pass one factor to all FSDPModules of model.modules(), "
                'group holders included, or set "zeroamp": {"reduce": "sum"} instead.'
            )


def refuse_set_by_caller(state: WrapState) -> None:
    """Raise StepError if a caller has set a flag that `TrainStep` sets, or divide factors that differ."""
    for name, instead in state.set_by_caller.items():
        if instead:
            default = name != MANUAL_END
            raise StepError(
                f"{name}({not default}) was called on the model, but TrainStep decides this for each micro-batch: "
                f"{instead}. Remove the call, or call {name}({default}) before train.backward."
            )
    refuse_different_factors(state.root)
    state.set_by_caller.clear()


def refuse_foreign(optimizers: Sequence[torch.optim.Optimizer], parameters: list[nn.Parameter]) -> None:
    """Raise StepError if an optimizer holds a parameter not in `parameters`, or two optimizers hold the same one."""
    owners: dict[int, int | None] = {id(parameter): None for parameter in parameters}
    for number, optimizer in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                kind = "a sharded" if isinstance(parameter, DTensor) else "an unsharded"
                found = f"{name}.param_groups[{index}] has {kind} parameter of shape {tuple(parameter.shape)}"
                if id(parameter) not in owners:
                    raise StepError(
                        f"{found} that is not one of the wrapped model's. Build the optimizer from model.parameters() "
                        "after wrap_model and before the first forward."
                    )
                if owners[id(parameter)] not in (None, number):
                    raise StepError(
                        f"{found} that optimizer {owners[id(parameter)]} also holds. Give each parameter to only one "
                        "optimizer."
                    )
                owners[id(parameter)] = number


def checked_max_norm(max_norm: object) -> float:
    """Return `max_norm` as a float. Raise StepError unless it is a number, or a tensor of one element, >= 0."""
    limit = float(max_norm) if isinstance(max_norm, Real | torch.Tensor) else math.nan
    if not limit >= 0:
        remedy = "Pass 0 for no clipping, or None for the config's gradient_clipping."
        raise StepError(describe("max_norm", repr(max_norm), "a number >= 0, or None", remedy))
    return limit


def refuse_closures(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise StepError for an optimizer whose step needs a closure. The closure would run forward and backward again."""
    for optimizer in optimizers:
        closure = signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise StepError(
                f"TrainStep was given {type(optimizer).__name__}, whose step needs a closure that runs forward and "
                "backward several times. Call optimizer.step(closure) in a loop without TrainStep: docs/recipes.md has "
                "an example."
            )


def no_gradient() -> StepError:
    """Return the error for an optimizer step that left no gradient on any parameter of this rank."""
    return StepError(
        "TrainStep.step found no gradient on any parameter. The loss must depend on trainable parameters of the "
        "wrapped model: check that it comes from this model's forward, and that not all of the model is frozen."
    )
