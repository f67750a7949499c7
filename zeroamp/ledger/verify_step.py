"""`Ledger.verify`: runs one observed optimizer step, and compares the dtypes that occur with those of the ledger."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from zeroamp.hooks.collectives.traffic import Traffic, listening
from zeroamp.hooks.observers.observed_dtypes import Observations, OpObserver, UnitObserver
from zeroamp.ledger.dtype_differences import Verification, find_differences, see_collectives
from zeroamp.ledger.dtype_reads import differing_reads
from zeroamp.ledger.observed_optimizer import Optimizers, listed, problem_with
from zeroamp.ledger.observed_step import ObservedStep, call, leaves_no_trace, observed_units, refuse_gradients
from zeroamp.planning.mesh import device_of, ranks_of
from zeroamp.planning.plan import Plan
from zeroamp.policies.accumulation import unsharded_accumulation
from zeroamp.policies.errors import PrecisionError, StepError, WrapError, describe
from zeroamp.training.loss import LossFunction, loss_of
from zeroamp.wrapping.run_alike import Description, run_alike
from zeroamp.wrapping.state import WrapState, refuse_joined, wrap_state

_NUM_DIFFERENCES = 8
"""How many differences an error lists at most."""


def verify(
    plan: Plan, model: nn.Module, batch: object, loss_fn: LossFunction | None, optimizer: Optimizers
) -> Verification:
    """See `Ledger.verify`."""
    state = wrap_state(model)
    refuse_joined(state, "Ledger.verify")
    if not state.axes.is_plain:
        raise WrapError(
            "Ledger.verify is not supported with tensor or expert parallelism. zeroamp.traffic(model) has what was "
            "communicated."
        )
    _run_on_all_ranks(state, lambda: _refuse_problem(plan, state, batch, optimizer))
    observations, counted = Observations(), Traffic()
    with leaves_no_trace(state), torch.inference_mode(False), torch.enable_grad():
        _observe_step(model, state, batch, loss_fn, listed(optimizer), observations, counted)
        reads = differing_reads(plan, model, state, batch)
    see_collectives(counted, plan, observations.seen)
    ranks = ranks_of(state.mesh)
    found = [*map(str, find_differences(plan, ranks, observations.seen)), *reads]
    _run_on_all_ranks(state, lambda: _refuse_differences(found))
    return Verification(
        plan=plan,
        ranks=ranks,
        observed=observations.seen,
        num_micro_batches=plan.policy.gradient_accumulation_steps,
        counted=counted,
    )


def _run_on_all_ranks(state: WrapState, check: Callable[[], None]) -> None:
    """Raise an error of one rank on all ranks."""

    def action() -> tuple[None, Description]:
        check()
        return None, {}

    run_alike(
        action,
        what="Ledger.verify",
        remedy="",
        error_type=PrecisionError,
        group=state.world,
        device=device_of(state.mesh),
    )


def _observe_step(
    model: nn.Module,
    state: WrapState,
    batch: object,
    loss_fn: LossFunction | None,
    optimizers: Sequence[torch.optim.Optimizer],
    observations: Observations,
    counted: Traffic,
) -> None:
    ops = OpObserver(observations)
    policy = state.plan.policy
    sums = policy.stage < 2 and policy.gradient_accumulation_steps > 1
    units = UnitObserver(observations, ops, unsharded_accumulation(policy) if sums else None)
    step = ObservedStep(state, observations)
    handles = units.attach(state.root, observed_units(state.plan))
    try:
        with listening(state.listeners, counted):
            for _ in range(policy.gradient_accumulation_steps):
                with torch.compiler.set_stance("force_eager"), ops:  # ops of compiled code cannot be observed
                    loss = loss_of(call(model, batch), loss_fn, where="Ledger.verify", error=StepError)
                ops.forget()
                step.backward(loss)
            step.update(optimizers)
    except BaseException:
        step.abandon()
        raise
    finally:
        units.detach()
        for handle in handles:
            handle.remove()


def _refuse_problem(plan: Plan, state: WrapState, batch: object, optimizer: Optimizers) -> None:
    """Raise an error for another model's ledger, an unusable batch or optimizer, or an unfinished optimizer step."""
    if plan != state.plan:
        raise WrapError("Ledger.verify: this is another model's ledger. Call explain(model).verify(model, ...).")
    if not isinstance(batch, torch.Tensor | tuple | Mapping):
        raise StepError(
            describe(
                "Ledger.verify(batch=)",
                f"a {type(batch).__name__}",
                "a tensor, a tuple of arguments, or a mapping of keyword arguments",
                "Pass what the model's forward takes.",
            )
        )
    if problem := problem_with(optimizer, state.root):
        raise StepError(f"Ledger.verify(optimizer=) {problem}.")
    refuse_gradients(state, "Ledger.verify")


def _refuse_differences(differences: list[str]) -> None:
    if differences:
        more = len(differences) - _NUM_DIFFERENCES
        left_out = [f"… and {more} more"] if more > 0 else []
        raise PrecisionError("\n".join([*differences[:_NUM_DIFFERENCES], *left_out]))
