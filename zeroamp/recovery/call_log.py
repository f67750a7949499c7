"""Logs the collectives that a rank issues, so that after a failure it can issue those that other ranks wait for.

[Note: Issuing the rest]
If one rank does not issue a collective, the other ranks cannot cancel it, and the process group is lost when the
collective times out. So a failed rank issues the remaining collectives of the optimizer step with zeros, in the order
of earlier steps. The other ranks run the step to its end, and get the number of failed ranks there.

This works with accelerator streams too. Collectives of different ranks are paired by the order in which each host
issues them on a process group, not by their streams. One thread issues the rest in one stream, in the recorded order,
after it has waited for FSDP2's streams. So each call can reuse the memory of the previous one's buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.fsdp import reduce_scatter
from zeroamp.hooks.collectives.nodes import all_gather_of_axis
from zeroamp.hooks.collectives.rank_sums import all_reduce_in_tree_order, exchange
from zeroamp.hooks.collectives.traffic import STEP, Collective, IssuedCollective, ReduceOp
from zeroamp.wrapping.state import WrapState


class Call(NamedTuple):
    """One collective, as this rank issues it."""

    collective: Collective
    group_name: str
    """Name of the parameter group in the plan."""
    process_group: dist.ProcessGroup
    dtype: torch.dtype
    numel: int
    """Elements of the unsharded tensor: the output of an all-gather, the input of the others."""
    op: ReduceOp = dist.ReduceOp.SUM
    """Op of a reduction. No effect on an all-gather or an all-to-all."""

    def __str__(self) -> str:
        return f"{self.collective} of {self.numel} x {self.dtype} for {self.group_name}"


@dataclass(slots=True)
class CallLog:
    """The collectives since the last optimizer step, and those of the step before. Sizes only, no tensors.

    Listens to the collectives of a model. A call is logged after it was issued: a call that raised is not logged.
    """

    state: WrapState
    """Of the model. Observed steps are not logged."""
    step: list[Call] = field(default_factory=list)
    """Calls of this optimizer step so far, without evaluations."""
    last_step: list[Call] | None = None
    """Calls of the last complete optimizer step; None before the first."""
    is_steady: bool = True
    """Whether the last two complete optimizer steps issued the same calls."""
    evaluation: list[Call] | None = None
    """Calls of the running forward without gradients; None outside of one."""
    last_evaluation: list[Call] | None = None
    """Calls of the last complete forward without gradients; None before the first."""

    def on_collective(self, issued: IssuedCollective) -> None:
        """Log a collective of a parameter group, after it was issued."""
        collective, tensor, group_name, process_group, op = issued
        if process_group is not None and group_name != STEP and not self.state.is_observed:
            calls = self.step if self.evaluation is None else self.evaluation
            calls.append(Call(collective, group_name, process_group, tensor.dtype, tensor.numel(), op))

    def end_step(self) -> None:
        """Retain the calls of this optimizer step as the expected calls of the next."""
        self.is_steady = self.last_step is None or self.last_step == self.step
        self.last_step, self.step = self.step, []

    def end_evaluation(self) -> None:
        """Retain an evaluation's calls as the expected ones of the next, unless it ran inside an optimizer step."""
        if not self.step:
            self.last_evaluation = self.evaluation
        self.evaluation = None

    def discard(self) -> None:
        """Discard the calls of the current optimizer step and evaluation."""
        self.step, self.evaluation = [], None


class ZeroBuffers:
    """Issues the remaining collectives of an optimizer step with zeros. Needs memory for twice the largest call."""

    def __init__(self, calls: Sequence[Call], device: torch.device, *, state: WrapState) -> None:
        """Check that the memory suffices for the largest call: allocate its buffers and release them.

        Raises:
            OutOfMemoryError: the memory does not suffice, although the failed step was released. No call was issued.
        """
        self._in_tree_order = state.plan.policy.reduce_accumulate_dtype == "fp32"
        of_shards = state.mesh.ndim - 1
        self._gathers, self._reductions = state.nodes.gathers.get(of_shards), state.nodes.reductions.get(of_shards)
        self._of_replicas = state.nodes.reductions.get(0) if state.mesh.ndim == 2 else None
        self._calls, self._device = calls, device
        largest = max(calls, key=lambda call: call.numel * call.dtype.itemsize, default=None)
        if largest is not None:
            self._buffers(largest)

    def _buffers(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros and an empty receive buffer, each of the call's size and dtype."""
        zeros = torch.zeros(call.numel, dtype=call.dtype, device=self._device)
        return zeros, torch.empty_like(zeros)

    def issue(self) -> None:
        """Issue all calls, see [Note: Issuing the rest]. The buffers of a call are released before the next one."""
        for call in self._calls:
            self._issue(call)

    def _issue(self, call: Call) -> None:
        zeros, received = self._buffers(call)
        part = call.numel // call.process_group.size()
        if call.collective == "all_gather":
            all_gather_of_axis(received, zeros[:part], call.process_group, self._gathers)
        elif call.collective == "reduce_scatter":
            reduce_scatter(received[:part], zeros, call.process_group, call.op)
        elif call.collective == "all_to_all":
            exchange(zeros, received, call.process_group, self._reductions)
        elif self._in_tree_order:
            all_reduce_in_tree_order(received.zero_(), call.process_group, nodes=self._of_replicas)
        else:
            dist.all_reduce(received.zero_(), op=call.op, group=call.process_group)
