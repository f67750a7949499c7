"""One training window that leaves no trace, for `Ledger.verify`: what `TrainStep` does, watched, with no update."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import unsharded_sums
from zeroamp.hooks._torch.recovery import abandon
from zeroamp.hooks.observers.dtypes import Observations
from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.planning.plan import Plan
from zeroamp.training.stages import set_flags
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.state import WrapState


class Rehearsal(TrainStep):
    """A `TrainStep` whose window ends without an update; it notes storage, accumulation and optimizer state.

    A loss scale is applied as at the start of a training; whether gradients overflow is not looked at.
    """

    _has_monitors = False

    def __init__(self, model: nn.Module, state: WrapState, observations: Observations) -> None:
        # Never stepped: the optimizer of the boundary is a throwaway one per parameter, on copies.
        super().__init__(model, torch.optim.AdamW(state.root.parameters(), lr=0.0))
        state.calls.is_on = False
        self._observations = observations
        self._names = {id(parameter): fqn for fqn, parameter in state.root.named_parameters()}
        for parameter in self._parameters:
            observations.seen.setdefault(self._names[id(parameter)], {})
            self._see(parameter, "storage", parameter.dtype, "the shard")

    def _see(self, parameter: nn.Parameter, boundary: str, dtype: torch.dtype, where: str) -> None:
        self._observations.see(self._names[id(parameter)], boundary, dtype, where)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch, and look at what it left."""
        super().backward(loss)
        policy = self._state.plan.policy
        is_last = self._num_micro_batches == policy.gradient_accumulation_steps
        if policy.stage < 2 and policy.gradient_accumulation_steps > 1:
            if not is_last:
                for parameter, total in (pair for unit in self._units for pair in unsharded_sums(unit)):
                    self._see(parameter, "accumulate", total.dtype, "the unsharded sum")
            return
        if self._state.shard_accumulator is not None:
            for parameter, total in self._state.shard_accumulator.sums.items():
                self._see(parameter, "accumulate", total.dtype, "the sharded sum")
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._see(parameter, "accumulate", parameter.grad.dtype, "the sharded gradient")

    def step_inside_window(self) -> None:
        """Say that the next backward may come."""
        self._is_stepped = True

    def end_window(self) -> None:
        """Do what an optimizer step does, on a copy of one parameter after the other, and drop the gradients."""
        self._reshard()
        if self._state.shard_accumulator is not None:
            self._state.shard_accumulator.flush()
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            copy = nn.Parameter(parameter.detach().clone())
            copy.grad, parameter.grad = parameter.grad, None
            optimizer = torch.optim.AdamW([copy])
            optimizer.step()
            for name, value in optimizer.state[copy].items():
                if name != "step":  # a count, not of the parameter's dtype
                    self._see(parameter, "optimizer", value.dtype, f"AdamW's {name}")
        self._num_micro_batches = 0

    def abandon(self) -> None:
        """Forget a window that was not ended."""
        abandon(self._root)
        if self._state.shard_accumulator is not None:
            self._state.shard_accumulator.drop()
        for parameter in self._parameters:
            parameter.grad = None
        self._num_micro_batches = 0
        set_flags(self._state, self._units, is_first=True, is_last=True)


@contextmanager
def leaves_no_trace(state: WrapState) -> Iterator[None]:
    """Put back, also when something raised: buffers, random states, counters, and what watches gradients."""
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in state.root.modules()
        for name, buffer in module._buffers.items()
    ]
    accumulator = state.shard_accumulator
    was_watching = accumulator is not None and accumulator.is_watching
    counts, state.traffic.enabled = state.traffic.enabled, False
    state.is_rehearsing = True
    is_recorded, failure = state.calls.is_on, state.watch.failure
    try:
        with preserved_random_state(state.mesh.device_type):
            yield
    finally:
        state.traffic.enabled, state.is_rehearsing = counts, False
        state.calls.is_on, state.watch.failure = is_recorded, failure
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
    """Return the modules at whose forward their units' parameters are gathered, and those parameters."""
    units: dict[str, list[str]] = {}
    for param in plan.params:
        for module in plan.modules_of(param.unit):
            units.setdefault(module, []).append(param.fqn)
    return units


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter of a wrapped model is in its sharded form; those without elements are in no other."""
    return isinstance(parameter, DTensor) or parameter.numel() == 0
