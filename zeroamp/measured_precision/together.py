"""Ends a run on all ranks if it fails on one of them, and raises one error on all.

A rank that raises in a forward or backward leaves the others in a collective that never ends. So before each collective
of the run, and at its end, the ranks compare their errors. A failed rank makes this comparison in place of its next
collective, and the others stop there.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.dispatch import TorchDispatchMode, run_op
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.run_alike import Outcome, attempt, is_alike, raise_failure

T = TypeVar("T")


class _OtherRankError(Exception):
    """A run has failed on another rank."""


class _StopsWithOthers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `_OtherRankError` in place of the next collective, if another rank has failed."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group, self._device = group, device
        self.is_stopped = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op; before a collective, compare errors with the other ranks."""
        # A run that has caught this error meets it again: the other ranks make no further collective of the run.
        if "c10d" in func.namespace and (self.is_stopped or not self.have_same_error("")):
            self.is_stopped = True
            raise _OtherRankError
        return run_op(func, args, kwargs or {})

    def have_same_error(self, text: str) -> bool:
        """Return whether all ranks have failed with this text; with "", whether no rank has failed."""
        return is_alike({"error": text}, "sensitivity", self._group, self._device)


def run_together(action: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device) -> T:
    """Return what `action`, a run with the same collectives on all ranks, returns on this rank.

    Raises:
        Exception: the error of `action`, if it is the same on all ranks.
        ZeroAmpError: on all ranks, with the texts of the errors, if it raised on some.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return action()
    mode = _StopsWithOthers(group, device)
    with mode:
        outcome, error = attempt(action)
    if mode.is_stopped:  # also if the run has replaced `_OtherRankError` by an error of its own
        outcome, error = Outcome(), None
    elif mode.have_same_error(outcome.text or ""):
        if error is not None:
            raise error
        return cast(T, outcome.result)
    outcomes: list[Any] = [None] * len(ranks)
    dist.all_gather_object(outcomes, Outcome(None, outcome.text, outcome.error_type), group=group)
    raise_failure(outcomes, ranks, StepError, error, what="sensitivity failed on ")
    raise AssertionError("expected an error of a rank")
