"""Brings the ranks together again after an exception on some of them. See docs/recovery.md.

[Note: The end of a window]
The last collective of a window is the sum of the step's statistics, and one of them is the number of ranks that failed.
A rank that failed reaches it by issuing the rest of the window (see [Note: Keeping one's part]),
the others by running into it. So all ranks leave it with the same answer, before any of them updates anything.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import release
from zeroamp.hooks._torch.recovery import abandon
from zeroamp.hooks.collectives.traffic import STEP, notify
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import PeerError, StepError, describe
from zeroamp.recovery.call_log import Call, ZeroBuffers
from zeroamp.recovery.expected_calls import expected_evaluation, expected_window
from zeroamp.recovery.forward_watch import Failure, Where, describe_error
from zeroamp.training.checks import without_gradient
from zeroamp.wrapping.state import WrapState

_RESTART = "Restart from the last checkpoint."


class Recovery:
    """What a `TrainStep` knows of failures on this rank and, at the end of each window, on the others."""

    def __init__(self, state: WrapState, world: dist.ProcessGroup | None) -> None:
        """`world` has all ranks of the mesh; None is the default group."""
        self._state = state
        self._world = world
        self._is_over = False  # whether the last window ended with a failure somewhere, and `recover` was not called
        self._is_on = state.calls.is_on = state.plan.policy.recovery

    @property
    def is_inside_window(self) -> bool:
        """Whether there is a window that others may still be in: not after `sum_over_ranks` said that it is over."""
        watch = self._state.watch
        return not self._is_over or watch.window_has_begun or watch.failure is not None

    @property
    def is_cut_short(self) -> bool:
        """Whether this rank left out the rest of a window's micro-batches."""
        failure = self._state.watch.failure
        return self.is_inside_window and (failure is None or failure.where in ("forward", "backward"))

    def refuse_after_failure(self, method: str) -> None:
        """Raise StepError if something raised and `recover` was not called since."""
        self._state.watch.refuse_after_failure(f"TrainStep.{method}")

    @contextmanager
    def noting(self, where: Where) -> Iterator[None]:
        """Note what raises inside, which goes on."""
        try:
            yield
        except BaseException as error:
            self._state.watch.note(where, error)
            raise

    def sum_over_ranks(
        self, loss: torch.Tensor, squares: torch.Tensor, has_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of two 0-D fp64 tensors, and end the window.

        Waits for the device unless recovery is off: nothing may be updated before it is known that no rank failed.

        Raises:
            StepError: there is no gradient on this rank.
            PeerError: on all other ranks, if one failed.
        """
        if not has_gradient:
            error = without_gradient()
            if not self._is_on:
                raise error
            self.end_as_failed(Failure(where="step", text=describe_error(error)))
            raise error
        statistics = self._sum(loss, squares, num_failed=0)
        if not self._is_on or float(statistics[2]) == 0:
            self._is_over = False
            self._state.watch.end_window()
            return statistics[0], statistics[1]
        failures = self._exchange(None)
        self._drop_window()
        found = "; ".join(f"a failure in {failure} on rank {rank}" for rank, failure in failures.items())
        remedy = "Nothing was updated here. Call train.recover() and go on with the next window."
        if not all(failure.can_be_recovered for failure in failures.values()):
            self._state.watch.failure = Failure(where="recovery", text=found)
            remedy = _RESTART
        raise PeerError(describe("TrainStep.step", found, "a window that all ranks run to its end", remedy))

    def end_as_failed(self, failure: Failure) -> None:
        """End the window in the place of `sum_over_ranks`: the other ranks raise."""
        zero = torch.zeros((), dtype=torch.float64, device=device_of(self._state.mesh))
        self._sum(zero, zero, num_failed=1)
        self._exchange(failure)
        self._drop_window()

    def recover(self) -> None:
        """Issue what the other ranks still wait for, and forget the window.

        Raises:
            StepError: this rank cannot know what they wait for, or is not whole itself.
        """
        if not self._is_on:
            remedy = f'Leave "zeroamp": {{"recovery": true}} as it is by default. {_RESTART}'
            raise StepError(describe("TrainStep.recover", "zeroamp.recovery: false", "true", remedy))
        failure = self._state.watch.failure
        if failure is not None and failure.where == "recovery":
            raise self._beyond_recovery(failure)
        if failure is not None and failure.where == "evaluation":
            self._finish_evaluation()
        elif self.is_inside_window:
            self._finish_window(failure)
        else:
            self._abandon()
        self._state.watch.drop_window()
        self._is_over = False
        if failure is not None and not failure.can_be_recovered:
            self._state.watch.failure = Failure(where="recovery", text=f"of {failure}")  # the others were told
            raise self._beyond_recovery(failure)

    def _beyond_recovery(self, failure: Failure) -> StepError:
        found = f"a failure in {failure}, after which parameters may be updated in part, or ranks be apart"
        return StepError(describe("TrainStep.recover", found, "one in a forward or a backward", _RESTART))

    def _finish_evaluation(self) -> None:
        """Gather for real what the others gather in this forward: it ends well there, and they are told nothing."""
        state = self._state
        rest = self._rest_of_evaluation()
        self._abandon()
        groups = {group.name: group for group in state.plan.groups}
        for call in rest:
            modules = state.plan.modules_of(groups[call.group_name].unit)
            group = state.holders.get(call.group_name) or cast(FSDPModule, state.root.get_submodule(modules[0]))
            group.unshard()
            release(group)

    def _finish_window(self, failure: Failure | None) -> None:
        """Issue the rest of the window with zeros, and tell the other ranks at its end."""
        rest = self._rest_of_window()
        failure = failure or Failure(where="the training loop", text=describe_error(sys.exception()))
        self._abandon()  # first: it frees the memory that the rest needs
        buffers = ZeroBuffers(rest, device_of(self._state.mesh))
        try:
            buffers.issue()
            self.end_as_failed(failure)
        except RuntimeError as problem:
            self._state.watch.failure = Failure(where="recovery", text=describe_error(problem))
            raise self._beyond_recovery(self._state.watch.failure) from problem

    def _rest_of_window(self) -> list[Call]:
        calls, plan = self._state.calls, self._state.plan
        if not calls.is_steady:
            raise self._unknown("windows that differ from each other", "the same collectives in every window")
        expected = calls.last_window
        if expected is None:
            expected = expected_window(plan, self._state.root, self._state.mesh)
        if expected is None:
            raise self._unknown("a first window whose collectives cannot be told before", "a window after it")
        return self._rest(calls.window, expected)

    def _rest_of_evaluation(self) -> list[Call]:
        calls = self._state.calls
        if self._state.watch.window_has_begun:
            raise self._unknown("an evaluation inside a window that raised", "one between windows")
        expected = calls.last_evaluation
        if expected is None:
            expected = expected_evaluation(self._state.plan, self._state.mesh)
        return self._rest(calls.evaluation or [], expected)

    def _rest(self, issued: list[Call], expected: list[Call]) -> list[Call]:
        for index, call in enumerate(issued):
            other = expected[index] if index < len(expected) else None
            if call != other:
                raise self._unknown(f"{call} as collective {index}, {other} was expected", "what windows before issued")
        return expected[len(issued) :]

    def _unknown(self, found: str, valid: str) -> StepError:
        remedy = f"What the other ranks wait for is not known. {_RESTART}"
        return StepError(describe("TrainStep.recover", found, valid, remedy))

    def _abandon(self) -> None:
        state = self._state
        abandon(cast(FSDPModule, state.root))
        state.evaluation.reset()
        if state.autocast is not None:
            state.autocast.reset()

    def _drop_window(self) -> None:
        self._is_over = True
        self._state.watch.drop_window()

    def _sum(self, loss: torch.Tensor, squares: torch.Tensor, *, num_failed: int) -> torch.Tensor:
        statistics = torch.stack([loss, squares, torch.full_like(loss, num_failed)])
        dist.all_reduce(statistics, group=self._world)
        notify(self._state.listeners, "all_reduce", statistics, STEP, self._world)
        return statistics

    def _exchange(self, failure: Failure | None) -> dict[int, Failure]:
        """Return what raised on the ranks that failed."""
        ranks = dist.get_process_group_ranks(self._world)
        failures: list[Failure | None] = [None] * len(ranks)
        dist.all_gather_object(failures, failure, group=self._world)
        return {rank: failure for rank, failure in zip(ranks, failures, strict=True) if failure is not None}
