"""Runs one optimizer step for `Ledger.verify`, without an update, and restores the model afterwards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import can_be_sharded, set_accumulation_dtype, units_of, unsharded_sums
from zeroamp.hooks.observers.observed_dtypes import Observations
from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.ledger.observed_optimizer import state_dtypes
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import StepError
from zeroamp.training.optimizer_step import Step
from zeroamp.wrapping.state import WrapState, reshard


class ObservedStep:
    """Runs the micro-batches of one optimizer step. Records the dtypes of shards, summed gradients and optimizer state.

    Losses are multiplied by the initial loss scale. Overflow of gradients is not checked.
    """

    def __init__(self, state: WrapState, observations: Observations) -> None:
        self._state = state
        self._step = Step(state)
        self._observations = observations
        self._names = {id(parameter): fqn for fqn, parameter in state.root.named_parameters()}
        for parameter in self._step.gradients.parameters:
            observations.seen.setdefault(self._names[id(parameter)], {})
            self._see(parameter, "stored", parameter.dtype, "the shard")

    def _see(self, parameter: nn.Parameter, boundary: str, dtype: torch.dtype | None, where: str) -> None:
        self._observations.see(self._names[id(parameter)], boundary, dtype, where)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch, and record the dtypes of the gradients that it leaves."""
        policy, step = self._state.plan.policy, self._step
        num_micro_batches = policy.gradient_accumulation_steps
        is_last = step.current.num_micro_batches + 1 == num_micro_batches
        if not step.current.is_open:
            step.gradients.refuse_other(step)
        with step.noting("backward"):  # FSDP2 cannot go on after a backward that raised
            step.run_backward(step.scaler.scale_loss(loss.float() / num_micro_batches), last=is_last)
        if policy.stage < 2 and num_micro_batches > 1:
            if not is_last:
                for parameter, total in (pair for unit in step.units for pair in unsharded_sums(unit)):
                    self._see(parameter, "accumulate", total.dtype, "the unsharded sum")
        elif self._state.step.shard_accumulator is not None and num_micro_batches > 1:
            for parameter, total in self._state.step.shard_accumulator.sums.items():
                self._see(parameter, "accumulate", total.dtype, "the sharded sum")
        else:
            for parameter in step.gradients.present():
                if parameter.grad is not None:
                    self._see(parameter, "accumulate", parameter.grad.dtype, "the sharded gradient")

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Record the dtypes of the state of `optimizers`, one parameter after the other, and discard the gradients."""
        self._step.finish()
        for parameter in self._step.gradients.present():
            gradient, parameter.grad = parameter.grad, None
            for dtype, where in state_dtypes(optimizers, parameter, gradient):
                self._see(parameter, "optimizer", dtype, where)
        self._step.end()

    def abandon(self) -> None:
        """Discard the step after an error."""
        self._step.abandon()
        reshard(self._step.units)


@contextmanager
def leaves_no_trace(state: WrapState) -> Iterator[None]:
    """Restore buffers, random states, counters, gradient hooks and the accumulation dtype on exit, also if it raises.

    Random states are those of the global generators, and of the generators that modules have as attributes.
    """
    attributes = [value for module in state.root.modules() for value in vars(module).values()]
    generators = [(value, value.get_state()) for value in attributes if isinstance(value, torch.Generator)]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in state.root.modules()
        for name, buffer in module._buffers.items()
    ]
    accumulator = state.step.shard_accumulator
    was_watching = accumulator is not None and accumulator.is_watching
    counts, state.traffic.enabled = state.traffic.enabled, False
    accumulates_in = state.step.accumulates_in
    state.step.is_observed = True
    try:
        with preserved_random_state(state.mesh.device_type):
            yield
    finally:
        state.traffic.enabled, state.step.is_observed = counts, False
        for generator, generator_state in generators:
            generator.set_state(generator_state)
        if state.step.accumulates_in != accumulates_in:
            state.step.accumulates_in = accumulates_in
            for unit in units_of(state.root):
                set_accumulation_dtype(unit, accumulates_in)
        if accumulator is not None and not was_watching:
            accumulator.forget()
        known = {(module, name) for module, name, _, _ in buffers}
        for module in state.root.modules():
            for name in [name for name in module._buffers if (module, name) not in known]:
                del module._buffers[name]
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                module._buffers[name] = buffer
                if buffer is not None and values is not None:
                    buffer.copy_(values)


def call(model: nn.Module, batch: object) -> Any:
    """Return the model's output for a tensor, a tuple of arguments, or a mapping of keyword arguments."""
    if isinstance(batch, tuple):
        return model(*batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch)


def observed_units(plan: Plan) -> dict[str, list[str]]:
    """Return unit -> FQNs of its parameters, which are unsharded in the unit's forward."""
    units: dict[str, list[str]] = {}
    for param in plan.params:
        units.setdefault(param.unit, []).append(param.fqn)
    return units


def refuse_gradients(state: WrapState, method: str) -> None:
    """Raise StepError if the model is inside of an optimizer step of any loop. The error names `method`."""
    if found := _unfinished(state):
        raise StepError(
            f"{method} must be called between two optimizer steps, but {found}. Call it before training, or after "
            "a step once the gradients are None (optimizer.zero_grad())."
        )


def _unfinished(state: WrapState) -> str | None:
    ignored = state.plan.ignored_fqns
    for fqn, parameter in state.root.named_parameters():
        if fqn not in ignored and not isinstance(parameter, DTensor) and can_be_sharded(parameter):
            return f"{fqn} is unsharded: a backward or an optimizer step has not ended"
        if parameter.grad is not None:
            return f"{fqn} has a gradient"
    if state.step.shard_accumulator is not None and state.step.shard_accumulator.sums:
        return "gradients of an unfinished optimizer step are accumulated"
    return None
