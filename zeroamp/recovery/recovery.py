"""Discards an optimizer step on all ranks after an exception on some: `zeroamp.recovery`. See docs/recovery.md.

[Note: The end of an optimizer step]
The last collective of an optimizer step is the all-reduce of its statistics. One statistic is the number of failed
ranks. A failed rank first issues the remaining collectives of the step (see [Note: Issuing the rest]); the others reach
the all-reduce as usual. So all ranks get the same number. If it is not 0, no rank updates a parameter: the host reads
the number before the update, or the update's kernels read it on the device (see [Note: A guarded update]).
"""

import sys
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import release
from zeroamp.hooks._torch.recovery import abandon
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective, notify
from zeroamp.planning.mesh import device_of, ranks_of
from zeroamp.planning.traffic import num_statistics
from zeroamp.policies.errors import PeerError, StepError
from zeroamp.recovery.call_log import Call, CallLog, ZeroBuffers
from zeroamp.recovery.expected_calls import expected_calls_of_evaluation, expected_calls_of_step
from zeroamp.recovery.forward_watch import ForwardWatch
from zeroamp.training.callbacks import HostReader
from zeroamp.training.micro_batches import RESTART, Failure, describe_error
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.state import wrap_state


def attach_recovery(train: TrainStep) -> None:
    """Attach a `Recovery` to a `TrainStep`, for `zeroamp.recovery`."""
    train.recovery = recovery = Recovery(train)
    train.callbacks.append(recovery)


class Recovery(HostReader):
    """Tracks failures on this rank, and exchanges them with the other ranks at the end of each optimizer step."""

    def __init__(self, train: TrainStep) -> None:
        state = wrap_state(train.model)
        self.calls = CallLog(state)
        self._state = state
        self._world = state.world
        self._callbacks = train.callbacks
        self._micro_batches = train.micro_batches
        self._micro_batches.remedy = (
            "Call train.recover() on every rank, outside of the except block, then continue with the next step."
        )
        self._watch = ForwardWatch(state, train.micro_batches, self.calls)
        self._is_over = False  # whether the last step failed on some rank, and `recover` was not called since
        state.listeners.append(self.calls)
        state.root_forward.add("recovery", self._watch.around)

    @property
    def _is_inside_step(self) -> bool:
        """Whether other ranks may still be in this optimizer step. False once `_end` has found a failure."""
        return not self._is_over or self._watch.has_begun or self._micro_batches.failure is not None

    @property
    def is_cut_short(self) -> bool:
        """Whether this rank skips the remaining micro-batches of an optimizer step."""
        failure = self._micro_batches.failure
        return self._is_inside_step and (failure is None or failure.where in ("forward", "backward"))

    def statistics(self) -> Sequence[float]:
        """Return 0, the number of failures: a failed rank sends 1 from `_end_as_failed` instead."""
        return (0.0,)

    def stops(self, sums: torch.Tensor, /) -> torch.Tensor:
        """Return whether a rank failed: 0-D bool, on the device."""
        return sums[0] != 0

    def reader(self) -> Callable[[Sequence[float]], None]:
        """Return the function that receives the number of failures and ends the optimizer step."""
        return self._end

    def _end(self, sums: Sequence[float]) -> None:
        """End the optimizer step. If a rank failed, no parameter was updated.

        Raises:
            PeerError: a rank failed.
        """
        if sums[0] == 0:
            self._is_over = False
            self._watch.end_step()
            return
        failures = self._exchange(None)
        self._discard_step()
        found = "; ".join(f"{failure} on rank {rank}" for rank, failure in failures.items())
        remedy = "Nothing was updated on this rank. Call train.recover() and continue with the next optimizer step."
        if not all(failure.can_be_recovered for failure in failures.values()):
            self._micro_batches.failure = Failure(where="recovery", text=found)
            remedy = RESTART
        raise PeerError(f"Another rank failed in this optimizer step: {found}. {remedy}")

    def on_no_gradient(self, error: Exception) -> None:
        """Send the failure to the other ranks, which wait in the all-reduce of the step's statistics."""
        self._end_as_failed(Failure(where="step", text=describe_error(error)))

    def on_step_discarded(self) -> None:
        """Discard the calls of the optimizer step. Buffers are not restored: `zero_grad` does not change them."""
        self.calls.discard()
        self._watch.has_begun = False

    def _end_as_failed(self, failure: Failure) -> None:
        """End the optimizer step after a failure on this rank: the other ranks raise in `_end`."""
        # The same count of numbers as on the other ranks: the step's own, then the callbacks' statistics.
        numbers = [0.0] * num_statistics(self._state.plan, ranks_of(self._state.mesh))
        for callback in self._callbacks.with_statistics():
            numbers += [1.0] if callback is self else [0.0] * len(callback.statistics())
        statistics = torch.tensor(numbers, dtype=torch.float64, device=device_of(self._state.mesh))
        dist.all_reduce(statistics, group=self._world)
        notify(self._state.listeners, IssuedCollective("all_reduce", statistics, STEP, self._world))
        self._exchange(failure)
        self._discard_step()

    def recover(self) -> None:
        """Issue the collectives that the other ranks still wait for, and discard the optimizer step.

        Raises:
            StepError: this rank cannot determine these collectives, or its parameters may be partly updated.
        """
        failure = self._micro_batches.failure
        if failure is not None and failure.where == "recovery":
            raise _beyond_recovery(failure)
        if failure is not None and failure.where == "evaluation":
            self._finish_evaluation()
        elif self._is_inside_step:
            self._finish_step(failure)
        else:
            self._abandon()
        self._watch.discard_step()
        self._is_over = False
        if failure is not None and not failure.can_be_recovered:
            # The other ranks have the failure.
            self._micro_batches.failure = Failure(where="recovery", text=f"after a failure in {failure}")
            raise _beyond_recovery(failure)

    def _finish_evaluation(self) -> None:
        """Issue the all-gathers that are left of this forward, so that the other ranks' evaluation succeeds."""
        state = self._state
        rest = self._rest_of_evaluation()
        self._abandon()
        groups = {group.name: group for group in state.plan.groups}
        for call in rest:
            modules = state.plan.modules_of(groups[call.group_name].unit)
            group = state.holders.get(call.group_name) or cast(FSDPModule, state.root.get_submodule(modules[0]))
            group.unshard()
            release(group)

    def _finish_step(self, failure: Failure | None) -> None:
        """Issue the rest of the optimizer step with zeros, and send the failure to the other ranks at its end."""
        rest = self._rest_of_step()
        failure = failure or Failure(where="the training loop", text=describe_error(sys.exception()))
        self._abandon()  # first: it frees the memory that the rest needs
        buffers = ZeroBuffers(rest, device_of(self._state.mesh), state=self._state)
        try:
            buffers.issue()
            self._end_as_failed(failure)
        except RuntimeError as problem:
            lost = Failure(where="recovery", text=describe_error(problem))
            self._micro_batches.failure = lost
            raise _beyond_recovery(lost) from problem

    def _rest_of_step(self) -> list[Call]:
        if not self.calls.is_steady:
            raise _unknown("the last two optimizer steps issued different collectives")
        expected = self.calls.last_step
        if expected is None:
            expected = expected_calls_of_step(self._state.plan, self._state.root, self._state.mesh)
        if expected is None:
            raise _unknown("it failed in the first optimizer step, and this model's collectives cannot be predicted")
        return _rest(self.calls.step, expected)

    def _rest_of_evaluation(self) -> list[Call]:
        if self._watch.has_begun:
            raise _unknown("an evaluation inside an optimizer step raised")
        expected = self.calls.last_evaluation
        if expected is None:
            expected = expected_calls_of_evaluation(self._state.plan, self._state.mesh)
        return _rest(self.calls.evaluation or [], expected)

    def _abandon(self) -> None:
        failure = self._micro_batches.failure
        abandon(cast(FSDPModule, self._state.root))
        self._state.root_forward.reset()
        self._micro_batches.failure = failure  # leaving the open forwards is not a new failure

    def _discard_step(self) -> None:
        self._is_over = True
        self._watch.discard_step()

    def _exchange(self, failure: Failure | None) -> dict[int, Failure]:
        """Return what raised on the ranks that failed."""
        ranks = dist.get_process_group_ranks(self._world)
        failures: list[Failure | None] = [None] * len(ranks)
        dist.all_gather_object(failures, failure, group=self._world)
        return {rank: failure for rank, failure in zip(ranks, failures, strict=True) if failure is not None}


def _rest(issued: list[Call], expected: list[Call]) -> list[Call]:
    for index, call in enumerate(issued):
        other = expected[index] if index < len(expected) else None
        if call != other:
            raise _unknown(f"collective {index} of this step was {call}, but {other} in earlier steps")
    return expected[len(issued) :]


def _unknown(why: str) -> StepError:
    return StepError(f"TrainStep.recover cannot determine the collectives that other ranks wait for: {why}. {RESTART}")


def _beyond_recovery(failure: Failure) -> StepError:
    return StepError(
        f"TrainStep.recover cannot continue after a failure in {failure}: parameters may be partly updated, or the "
        f"ranks' collectives may no longer match. {RESTART}"
    )
