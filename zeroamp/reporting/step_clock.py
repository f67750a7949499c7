"""Splits the time of an optimizer step into its parts, without waiting for the device.

On the CPU a mark is a reading of the clock. On an accelerator it is an event in the compute stream. The time between
two events is read one step later, when the host has waited for the step's all-reduce anyway.

[Note: Exposed communication]
FSDP2 all-gathers in `unshard`, waits in `wait_for_unshard`, reduces in `post_backward`, and waits for the last
reductions in a callback at the end of the backward. On the CPU the collectives block the thread inside these methods.
On an accelerator the collectives run in other streams, and the compute stream waits inside these methods. So marks
before and after a method bracket the wait. The copies and casts into and out of the flat buffers are counted too,
because they exist only with sharding. A collective that overlaps with computation counts nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zeroamp.hooks._torch.fsdp import communication_methods
from zeroamp.reporting.step_record import PARTS


class StepClock:
    """Collects marks at which one part of the step ends and another begins. `end_step` returns a function that reads.

    The parts are those of `PARTS`. "other" is the part outside of the others.
    """

    def __init__(self, device_type: str) -> None:
        self._is_on_host = device_type == "cpu"
        self._device_type = device_type
        self._part = "other"
        self._marks: list[tuple[str, Any]] = []
        """Part, and the mark of its begin. The first part that is not "other" begins the first step."""

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Count the time inside to a part, without that of the parts inside it."""
        outer = self.begin(part)
        try:
            yield
        finally:
            self.begin(outer)

    def begin(self, part: str) -> str:
        """End the current part, and begin another. Return the one that ended."""
        ended, self._part = self._part, part
        if part != ended:
            self._marks.append((part, self._now()))
        return ended

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of FSDP2 that counts as communication inside of the parts, and not in an evaluation."""

        @wraps(method)
        def communicating(*args: Any, **kwargs: Any) -> Any:
            if self._part == "other":
                return method(*args, **kwargs)
            with self.inside("exposed_communication"):
                return method(*args, **kwargs)

        return communicating

    def end_step(self) -> Callable[[], dict[str, float]]:
        """End this step and begin the next. The function waits for the device, and returns the seconds of each part."""
        end = (self._part, self._now())
        marks, self._marks = [*self._marks, end], [end]
        return lambda: self._read(marks)

    def _now(self) -> Any:
        if self._is_on_host:
            return time.perf_counter()
        event = torch.get_device_module(self._device_type).Event(enable_timing=True)
        event.record()
        return event

    def _read(self, marks: list[tuple[str, Any]]) -> dict[str, float]:
        seconds = dict.fromkeys(PARTS, 0.0)
        if not self._is_on_host:
            marks[-1][1].synchronize()  # all others are before it
        for (part, begin), (_, end) in pairwise(marks):
            seconds[part] += end - begin if self._is_on_host else begin.elapsed_time(end) / 1000
        return seconds


def time_communication(root: nn.Module, clock: StepClock) -> Callable[[], None]:
    """Wrap FSDP2's methods that communicate, by attributes of the instances. The returned function restores them."""
    before = [(owner, name, vars(owner).get(name)) for owner, name in communication_methods(root)]
    for owner, name, _ in before:
        setattr(owner, name, clock.timed(getattr(owner, name)))

    def restore() -> None:
        for owner, name, attribute in before:
            delattr(owner, name)
            if attribute is not None:
                setattr(owner, name, attribute)

    return restore
