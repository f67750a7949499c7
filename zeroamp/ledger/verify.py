"""`Ledger.verify`: runs one training window, watched, and compares what was seen with what the ledger promised."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.hooks.observers.dtypes import Observations, OpObserver, UnitObserver
from zeroamp.ledger.observed_step import Rehearsal, call, is_sharded, leaves_no_trace, observed_units
from zeroamp.ledger.verification import Verification, find_differences, see_collectives
from zeroamp.planning.plan import Plan
from zeroamp.planning.traffic import plan_traffic, ranks_of
from zeroamp.policies.accumulation import unsharded_accumulation
from zeroamp.policies.errors import PrecisionError, StepError, WrapError, ZeroAmpError, describe
from zeroamp.training.loss import LossFunction, loss_of
from zeroamp.wrapping.state import WrapState, wrap_state

_NUM_DIFFERENCES = 8  # that an error lists in full, of thousands of parameters


def verify(plan: Plan, model: nn.Module, batch: object, loss_fn: LossFunction | None) -> Verification:
    """See `Ledger.verify`."""
    state = wrap_state(model)
    problem = _problem(plan, state, batch)
    _raise_together([str(problem)] if problem else [], state.mesh, type(problem) if problem else StepError)
    observations, counted = Observations(), Traffic()
    with leaves_no_trace(state), torch.inference_mode(False), torch.enable_grad():
        _rehearse(model, state, batch, loss_fn, observations, counted)
    see_collectives(counted, plan, observations.seen)
    ranks = ranks_of(state.mesh)
    found = [str(difference) for difference in find_differences(plan, ranks, observations.seen)]
    _raise_together(found, state.mesh, PrecisionError)
    return Verification(
        plan=plan,
        ranks=ranks,
        observed=observations.seen,
        num_micro_batches=plan.policy.gradient_accumulation_steps,
        planned=plan_traffic(plan, ranks),
        counted=counted,
    )


def _rehearse(
    model: nn.Module,
    state: WrapState,
    batch: object,
    loss_fn: LossFunction | None,
    observations: Observations,
    counted: Traffic,
) -> None:
    ops = OpObserver(observations)
    policy = state.plan.policy
    sums = policy.stage < 2 and policy.gradient_accumulation_steps > 1
    units = UnitObserver(observations, ops, unsharded_accumulation(policy) if sums else None)
    rehearsal = Rehearsal(model, state, observations)
    handles = units.attach(state.root, observed_units(state.plan))
    state.traffic.observers.append(counted.count)
    try:
        for _ in range(policy.gradient_accumulation_steps):
            with torch.compiler.set_stance("force_eager"), ops:  # compiled code has no ops to look at
                loss = loss_of(call(model, batch), loss_fn, where="Ledger.verify", error=StepError)
            ops.forget()
            rehearsal.backward(loss)
            rehearsal.step_inside_window()
        rehearsal.end_window()
    except BaseException:
        rehearsal.abandon()
        raise
    finally:
        state.traffic.observers.remove(counted.count)
        units.detach()
        for handle in handles:
            handle.remove()


def _problem(plan: Plan, state: WrapState, batch: object) -> ZeroAmpError | None:
    """Return why nothing can be verified now, or None."""
    if plan != state.plan:
        return WrapError(
            describe("Ledger.verify", "another model's ledger", "explain(model).verify(model, ...)", "Take that one.")
        )
    if not isinstance(batch, torch.Tensor | tuple | Mapping):
        return StepError(
            describe(
                "Ledger.verify(batch=)",
                f"a {type(batch).__name__}",
                "a tensor, a tuple of arguments, or a mapping of keyword arguments",
                "Pass what the model's forward takes.",
            )
        )
    if found := _unfinished(state):
        return StepError(
            describe(
                "Ledger.verify",
                found,
                "a call between two optimizer steps, with no gradients left",
                "Call it before training or after a step, once the gradients are None (optimizer.zero_grad()).",
            )
        )
    return None


def _unfinished(state: WrapState) -> str | None:
    for fqn, parameter in state.root.named_parameters():
        if not is_sharded(parameter):
            return f"{fqn} gathered, inside an unfinished window or before a backward"
        if parameter.grad is not None:
            return f"a gradient on {fqn}"
    if state.shard_accumulator is not None and state.shard_accumulator.sums:
        return "accumulated gradients of an unfinished window"
    return None


def _raise_together(found: list[str], mesh: DeviceMesh, error: type[ZeroAmpError]) -> None:
    """Raise on all ranks what any of them found, so that none waits for another that raised. One small collective."""
    everywhere: list[list[str]] = [found]
    for axis in range(mesh.ndim):
        by_rank: list[list[list[str]]] = [[] for _ in range(mesh.size(axis))]
        dist.all_gather_object(by_rank, everywhere, group=mesh.get_group(axis))
        everywhere = [texts for rank in by_rank for texts in rank]
    texts = list(dict.fromkeys(text for rank in everywhere for text in rank))
    if not texts:
        return
    left_out = [f"… and {len(texts) - _NUM_DIFFERENCES} more"] if len(texts) > _NUM_DIFFERENCES else []
    num_ranks = sum(bool(rank) for rank in everywhere)
    on = [] if num_ranks == len(everywhere) else [f"On {num_ranks} of {len(everywhere)} ranks."]
    raise error("\n".join([*texts[:_NUM_DIFFERENCES], *left_out, *on]))
