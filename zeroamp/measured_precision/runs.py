"""Runs a forward and backward of a wrapped model in asked precisions, and compares gradients on their shards."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import all_gathering_as_stored, end_failed_backward
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.ledger.observed_step import call, leaves_no_trace
from zeroamp.measured_precision.switch import PrecisionSwitch
from zeroamp.planning.mesh import device_of, local_part, num_copies
from zeroamp.policies.errors import StepError
from zeroamp.training.loss import loss_of as loss_of_output
from zeroamp.training.optimizer_step import Step
from zeroamp.wrapping.state import WrapState, reshard

LossOf = Callable[[nn.Module, Any], torch.Tensor]
"""Returns the scalar loss of (model, batch)."""
Shards = Mapping[str, torch.Tensor]
"""FQN -> this rank's shard of a gradient, fp32, without parameters that no batch used."""
Squares = Mapping[str, float]
"""FQN -> the sum of the squares of a gradient, or of a difference, over all ranks."""


def ratio(own: Squares, whole: Squares, fqns: Collection[str] | None = None) -> float:
    """Return the norm of a gradient, of these parameters or of all, over that of another. inf if it is no number."""
    names = sorted(own if fqns is None else fqns)
    above, below = (sum(each[name] for name in names) for each in (own, whole))
    if above == 0:
        return 0.0
    return math.sqrt(above / below) if below > 0 and math.isfinite(above / below) else math.inf


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run: means over the batches of all ranks."""

    loss: float
    gradient: Shards


@contextmanager
def _preserved_generators(root: nn.Module) -> Iterator[None]:
    """Restore the generators that modules have as attributes. Those of torch itself are global."""
    values = (value for module in root.modules() for value in vars(module).values())
    before = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


class Runs:
    """Runs batches through a wrapped model, between two optimizer steps. No run leaves anything behind."""

    def __init__(self, state: WrapState, model: nn.Module, loss_of: LossOf | None, switch: PrecisionSwitch) -> None:
        self._state, self._model, self._loss_of, self._switch = state, model, loss_of, switch
        self._step = Step(state)
        names = {parameter: fqn for fqn, parameter in state.root.named_parameters()}
        self._parameters = {names[each]: each for each in self._step.gradients.averaged if each.requires_grad}

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """All-gather and reduce in fp32, and let the switch decide how groups compute. Call after a first run."""
        reductions = [each.reduction for each in self._state.gradients if each.reduction is not None]
        before = [(each.communication_dtype, each.reduce_dtype) for each in reductions]
        for reduction in reductions:
            reduction.communication_dtype = reduction.reduce_dtype = torch.float32
        try:
            with all_gathering_as_stored(self._state.root), self._switch.attached():
                yield
        finally:
            for reduction, dtypes in zip(reductions, before, strict=True):
                reduction.communication_dtype, reduction.reduce_dtype = dtypes

    def run(self, batches: Sequence[Any], low: Collection[str] = ()) -> Run:
        """Run a forward and backward of each batch. Inside of `in_fp32`, the groups in `low` run in low precision."""
        self._switch.low = frozenset(low)
        loss = torch.zeros(1, dtype=torch.float64, device=device_of(self._state.mesh))
        shards: dict[str, torch.Tensor] = {}
        with leaves_no_trace(self._state), _preserved_generators(self._state.root):
            for batch in batches:
                try:
                    loss += self._backward(batch, len(batches)).double()
                except BaseException:
                    self._step.gradients.release()  # so that the end of the backward reduces nothing
                    end_failed_backward(cast(FSDPModule, self._state.root))
                    self._step.abandon()
                    reshard(self._step.units)
                    raise
                for fqn, parameter in self._parameters.items():
                    if parameter.grad is not None:
                        shard = local_part(parameter.grad.detach()).div_(self._step.scaler.scale)
                        shards[fqn] = shards[fqn].add_(shard) if fqn in shards else shard
                self._step.end()
        return Run(float(self._sum(loss)) / dist.get_world_size(self._state.world), shards)

    def _backward(self, batch: Any, num_batches: int) -> torch.Tensor:
        """Run one forward and backward, and return the loss, divided by the number of batches."""
        with torch.compiler.set_stance("force_eager"):  # compiled code was traced with other dtypes
            output = call(self._model, batch) if self._loss_of is None else self._loss_of(self._model, batch)
        loss = loss_of_output(output, None, where="sensitivity", error=StepError).float() / num_batches
        self._step.run_backward(self._step.scaler.scale_loss(loss), last=True)
        self._step.finish()
        if (whole := self._step.gradients.replicated) is not None:
            sums = self._sum(torch.cat(whole.statistics(device_of(self._state.mesh))))
            whole.set_gradients(sums, dist.get_world_size(self._state.world))
        return loss.detach()

    @torch.no_grad()
    def squares(self, gradient: Shards, reference: Shards | None = None) -> Squares:
        """Return the squares of a gradient, or of its difference to the reference."""
        zero = torch.zeros((), device="cpu")  # torch takes it beside tensors of every device
        others: Shards = reference or {}

        def square(fqn: str) -> list[torch.Tensor]:
            difference = gradient.get(fqn, zero) - others.get(fqn, zero)
            return [torch.linalg.vector_norm(difference, dtype=torch.float64).square()]

        return {fqn: numbers[0] for fqn, numbers in self._sums(square).items()}

    @torch.no_grad()
    def lost_in(self, dtype: torch.dtype, gradient: Shards) -> Mapping[str, Sequence[float]]:
        """Return FQN -> numbers of elements: all, those that overflow in `dtype` at the loss scale, and new zeros."""
        scale = self._step.scaler.scale

        def lost(fqn: str) -> list[torch.Tensor]:
            shard = gradient.get(fqn, torch.zeros(0, device="cpu"))
            low = (shard * scale).to(dtype)
            return [torch.tensor(shard.numel()), low.isinf().sum(), ((low == 0) & (shard != 0)).sum()]

        return self._sums(lost)

    def _sums(self, numbers_of: Callable[[str], Sequence[torch.Tensor]]) -> dict[str, list[float]]:
        """Return FQN -> sums over all ranks of 0-D numbers of a parameter's shards, each shard counted once."""
        device, num_ranks, rows = device_of(self._state.mesh), dist.get_world_size(self._state.world), []
        for fqn, parameter in self._parameters.items():
            numbers = torch.stack([each.to(device, torch.float64) for each in numbers_of(fqn)])
            rows.append(numbers / num_copies(parameter, num_ranks))
        return dict(zip(self._parameters, self._sum(torch.stack(rows)).tolist(), strict=True))

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        group = self._state.world
        issued = IssuedCollective("all_reduce", numbers, "sensitivity", group)
        issue(lambda: dist.all_reduce(numbers, group=group), issued, ())
        return numbers
