"""Runs a forward and backward of a wrapped model in asked precisions, and compares gradients on their shards."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from zeroamp.measured_precision.together import run_together
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


class Runs:
    """Runs batches through a wrapped model, between two optimizer steps. No run leaves anything behind."""

    def __init__(self, state: WrapState, model: nn.Module, loss_of: LossOf | None, switch: PrecisionSwitch) -> None:
        self._state, self._model, self._loss_of, self._switch = state, model, loss_of, switch
        self._device, self._num_ranks = device_of(state.mesh), dist.get_world_size(state.world)
        self._step = Step(state)
        named, ignored = state.root.named_parameters(), state.plan.ignored_fqns
        self._parameters = {fqn: each for fqn, each in named if each.requires_grad and fqn not in ignored}

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
        """Run a forward and backward of each batch. Inside of `in_fp32`, the groups in `low` run in low precision.

        An error of one rank is raised on all.
        """
        self._switch.low = frozenset(low)
        with leaves_no_trace(self._state):
            return run_together(partial(self._run_here, batches), self._state.world, self._device)

    def _run_here(self, batches: Sequence[Any]) -> Run:
        loss, shards = torch.zeros(1, dtype=torch.float64, device=self._device), dict[str, torch.Tensor]()
        try:
            for batch in batches:
                loss += self._backward(batch, len(batches)).double()
                for fqn, parameter in self._parameters.items():
                    if parameter.grad is not None:
                        shard = local_part(parameter.grad.detach()).div_(self._step.scaler.scale)
                        shards[fqn] = shards[fqn].add_(shard) if fqn in shards else shard
                self._step.end()
        except BaseException as error:
            self._step.gradients.release()  # so that the end of the backward reduces nothing
            end_failed_backward(cast(FSDPModule, self._state.root))
            self._step.abandon()
            reshard(self._step.units)
            if isinstance(error, torch.OutOfMemoryError):
                raise StepError(
                    f"sensitivity: the forward and backward of a batch does not fit into memory: {error} Pass several "
                    "smaller batches, checkpoint activations, or wrap the model at stage 3 or over more ranks: all but "
                    "the first run have parameters and activations in fp32. Other groups= need as much."
                ) from error
            raise
        return Run(float(self._sum(loss)) / self._num_ranks, shards)

    def _backward(self, batch: Any, num_batches: int) -> torch.Tensor:
        """Run one forward and backward, and return the loss, divided by the number of batches."""
        with torch.compiler.set_stance("force_eager"):  # compiled code was traced with other dtypes
            output = call(self._model, batch) if self._loss_of is None else self._loss_of(self._model, batch)
        loss = loss_of_output(output, None, where="sensitivity", error=StepError).float() / num_batches
        self._step.run_backward(self._step.scaler.scale_loss(loss), last=True)
        self._step.finish()
        if (whole := self._step.gradients.replicated) is not None:
            sums = self._sum(torch.cat(whole.statistics(self._device)))
            whole.set_gradients(sums, self._num_ranks)
        return loss.detach()

    @torch.no_grad()
    def squares(self, gradient: Shards, reference: Shards | None = None) -> Squares:
        """Return the squares of a gradient, or of its difference to the reference."""
        zero = torch.zeros((), device="cpu")  # torch takes it beside tensors of every device
        others: Shards = reference or {}
        squares = []
        for fqn, parameter in self._parameters.items():
            difference = gradient.get(fqn, zero) - others.get(fqn, zero)
            square = torch.linalg.vector_norm(difference, dtype=torch.float64).square()
            squares.append(square.to(self._device) / num_copies(parameter, self._num_ranks))
        sums = self._sum(torch.stack(squares))
        return dict(zip(self._parameters, sums.tolist(), strict=True))

    @torch.no_grad()
    def lost_in(self, dtype: torch.dtype, gradient: Shards, fqns: Collection[str]) -> Mapping[str, float]:
        """Return the shares of these parameters' gradients that overflow in `dtype` at the loss scale, and become 0."""
        counts = torch.zeros(3, dtype=torch.float64, device="cpu")
        for fqn in gradient.keys() & fqns:
            shard = gradient[fqn]
            low = (shard * self._step.scaler.scale).to(dtype)
            lost = [shard.numel(), int(low.isinf().sum()), int(((low == 0) & (shard != 0)).sum())]
            counts += torch.tensor(lost) / num_copies(self._parameters[fqn], self._num_ranks)
        counts = self._sum(counts.to(self._device))
        num, overflow, underflow = counts.tolist()
        return {"overflow": overflow / max(num, 1), "underflow": underflow / max(num, 1)}

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by its sum over the ranks, and return it."""
        group = self._state.world
        issued = IssuedCollective("all_reduce", numbers, "sensitivity", group)
        issue(lambda: dist.all_reduce(numbers, group=group), issued, ())
        return numbers
