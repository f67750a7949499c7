"""Ends a run on all ranks if it fails on one of them, and raises one error on all.

A rank that raises in a forward or backward leaves the others in a collective that never ends. So each collective of the
run is preceded by an all-reduce of the number of failed ranks. A rank that has failed makes it where it would have made
its next collective, and the others stop there.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.dispatch import TorchDispatchMode, run_op
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.run_alike import Description, run_alike

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
        """Run the op; before a collective, ask the other ranks."""
        if "c10d" in func.namespace:
            self.exchange(has_failed=False)
        return run_op(func, args, kwargs or {})

    def exchange(self, *, has_failed: bool) -> None:
        """Send to the other ranks whether this one has failed, and stop if another has."""
        num_failed = int(sum_over_ranks(torch.tensor([int(has_failed)], device=self._device), self._group))
        if num_failed and not has_failed:
            self.is_stopped = True
            raise _OtherRankError


def run_together(action: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device) -> T:
    """Return what `action`, a run with the same collectives on all ranks, returns on this rank.

    Raises:
        Exception: the error of `action`, if it is the same on all ranks.
        ZeroAmpError: on all ranks, with the texts of the errors, if it raised on some.
    """
    if dist.get_world_size(group) == 1:
        return action()

    def on_this_rank() -> tuple[T | None, Description]:
        mode = _StopsWithOthers(group, device)
        try:
            with mode:
                result = action()
            mode.exchange(has_failed=False)
        except Exception:
            if mode.is_stopped:  # also if the run has replaced `_OtherRankError` by an error of its own
                return None, {}
            mode.exchange(has_failed=True)
            raise
        return result, {}

    found = run_alike(on_this_rank, what="sensitivity", remedy="", error_type=StepError, group=group, device=device)
    if found is None:
        raise AssertionError("expected a result, or an error of another rank")
    return found


def sum_over_ranks(numbers: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Replace a tensor by its sum over the ranks, and return it."""
    issued = IssuedCollective("all_reduce", numbers, "sensitivity", group)
    issue(lambda: dist.all_reduce(numbers, group=group), issued, ())
    return numbers
