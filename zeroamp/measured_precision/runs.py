"""Runs a forward and backward of a wrapped model in asked precisions, and compares gradients on their shards."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import all_gathering_as_stored, end_failed_backward
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.ledger.observed_step import call, leaves_no_trace
from zeroamp.measured_precision.switch import PrecisionSwitch
from zeroamp.planning.mesh import device_of, local_part, shard_size
from zeroamp.policies.errors import StepError
from zeroamp.training.loss import loss_of as loss_of_output
from zeroamp.training.optimizer_step import Step
from zeroamp.wrapping.state import WrapState, reshard

LossOf = Callable[[nn.Module, Any], torch.Tensor]
"""Returns the scalar loss of (model, batch)."""
LOSS = "the loss"
Gradient = Mapping[str, torch.Tensor]
"""FQN -> this rank's shard, fp32, and `LOSS` -> this rank's loss, 0-D fp64: means over the batches."""
Squares = Mapping[str, float]
"""FQN -> the sum of the squares of a gradient, or of a difference, over all ranks, and `LOSS` -> the sum of losses."""


def ratio(own: Squares, whole: Squares, fqns: Collection[str] | None = None) -> float:
    """Return the norm of a gradient, of these parameters or of all, over that of another. inf if it is no number."""
    names = own.keys() - {LOSS} if fqns is None else fqns
    above, below = (sum(each[name] for name in sorted(names)) for each in (own, whole))
    if above == 0:
        return 0.0
    return math.sqrt(above / below) if below > 0 and math.isfinite(above / below) else math.inf


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

    def gradient(self, batches: Sequence[Any], low: Collection[str] = ()) -> Gradient:
        """Return the gradient of the mean loss. Inside of `in_fp32`, the groups in `low` run in low precision."""
        self._switch.low = frozenset(low)
        sums = {LOSS: torch.zeros((), dtype=torch.float64, device=device_of(self._state.mesh))}
        with leaves_no_trace(self._state):
            for batch in batches:
                try:
                    sums[LOSS] += self._backward(batch, len(batches)).double()
                except BaseException:
                    end_failed_backward(cast(FSDPModule, self._state.root))
                    self._step.abandon()
                    reshard(self._step.units)
                    raise
                for fqn, parameter in self._parameters.items():
                    if parameter.grad is not None:
                        shard = local_part(parameter.grad.detach()).div_(self._step.scaler.scale)
                        sums[fqn] = sums[fqn].add_(shard) if fqn in sums else shard
                self._step.end()
        return sums

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
    def squares(self, gradient: Gradient, minus: Gradient | None = None) -> Squares:
        """Return the squares of a gradient, or of its difference to another one. One all-reduce."""

        def square(name: str) -> torch.Tensor:
            shard, other = gradient.get(name), None if minus is None else minus.get(name)
            difference = shard if other is None else -other if shard is None else shard - other
            if difference is None:
                return torch.zeros_like(gradient[LOSS])
            norm: torch.Tensor = torch.linalg.vector_norm(difference, dtype=torch.float64)
            return norm.square().to(gradient[LOSS].device)

        loss = gradient[LOSS] - (0 if minus is None else minus[LOSS])
        sums = self._sum(torch.stack([loss, *(square(name) / self._num_whole(name) for name in self._parameters)]))
        return dict(zip((LOSS, *self._parameters), sums.tolist(), strict=True))

    @torch.no_grad()
    def lost_in(self, dtype: torch.dtype, gradient: Gradient) -> dict[str, list[float]]:
        """Return FQN -> numbers of elements: all, those that overflow in `dtype` at the loss scale, and new zeros."""
        counts = []
        for name in self._parameters:
            shard = gradient.get(name, gradient[LOSS].new_zeros(0, dtype=torch.float32))
            low = (shard * self._step.scaler.scale).to(dtype)
            lost = [torch.ones_like(low, dtype=torch.bool), low.isinf(), (low == 0) & (shard != 0)]
            counts.append(torch.stack([each.sum() for each in lost]).double() / self._num_whole(name))
        sums = self._sum(torch.stack(counts).to(gradient[LOSS].device))
        return dict(zip(self._parameters, sums.tolist(), strict=True))

    def _num_whole(self, name: str) -> int:
        """Return on how many ranks of a replica a parameter is whole, and would be counted again."""
        return 1 if isinstance(self._parameters[name], DTensor) else shard_size(self._state.mesh)

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        group = self._state.world
        issued = IssuedCollective("all_reduce", numbers, "sensitivity", group)
        issue(lambda: dist.all_reduce(numbers, group=group), issued, ())
        return numbers
