"""Splits the time of an optimizer step into its parts, without waiting for the device.

On the CPU a mark is a reading of the clock. On an accelerator it is an event in the compute stream. The time between
two events is read one step later, when the host has waited for the step's all-reduce anyway.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Part = Literal["forward", "backward", "optimizer"]
Mark = Any
"""A reading of the host's clock in seconds, or a device event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """Seconds of one step; the four parts do not overlap."""

    step_s: float
    forward_s: float
    backward_s: float
    exposed_communication_s: float
    optimizer_s: float


class HostMarks:
    """Takes marks from the host's clock."""

    def now(self) -> Mark:
        """Return a mark of this moment."""
        return time.perf_counter()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the seconds between two marks."""
        return float(end - begin)


class DeviceMarks:
    """Takes marks as events in the current stream of an accelerator."""

    def __init__(self, device_type: str) -> None:
        self._event: Callable[..., Any] = torch.get_device_module(device_type).Event

    def now(self) -> Mark:
        """Record an event. The host does not wait."""
        event = self._event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Wait for the later event, and return the seconds between the two."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


@dataclass(slots=True)
class _Stretches:
    """Begin and end of each part of one step, in order, and of each wait for communication, with the part it was in."""

    begin: Mark
    parts: list[tuple[Part, Mark, Mark]] = field(default_factory=list)
    waits: list[tuple[Part, Mark, Mark]] = field(default_factory=list)


class StepClock:
    """Collects the marks of a step. `end_step` returns a function that reads them."""

    def __init__(self, device_type: str) -> None:
        self.is_immediate = device_type == "cpu"
        """Whether a step can be read as soon as it ended."""
        self._marks = HostMarks() if self.is_immediate else DeviceMarks(device_type)
        self._stretches: _Stretches | None = None
        self._open: tuple[Part, Mark] | None = None
        self._wait: Mark | None = None

    def enter(self, part: Part) -> None:
        """Begin a part of the step. The first call begins the first step."""
        mark = self._marks.now()
        self._stretches = self._stretches or _Stretches(mark)
        self._open = part, mark

    def leave(self) -> None:
        """End the current part."""
        if self._open is not None and self._stretches is not None:
            part, begin = self._open
            self._stretches.parts.append((part, begin, self._marks.now()))
        self._open = None

    def enter_communication(self) -> None:
        """Begin a wait of the thread or the stream. Ignored outside of the parts, as in an evaluation."""
        if self._open is not None:
            self._wait = self._marks.now()

    def leave_communication(self) -> None:
        """End the wait."""
        if self._open is not None and self._wait is not None and self._stretches is not None:
            self._stretches.waits.append((self._open[0], self._wait, self._marks.now()))
        self._wait = None

    def end_step(self) -> Callable[[], TimeSplit]:
        """End this step and begin the next. The returned function waits for the device if it has not finished yet."""
        stretches, end = self._stretches, self._marks.now()
        if stretches is None:
            raise AssertionError("expected a step in which some part ran, got none")
        self._stretches = _Stretches(end)
        return lambda: self._read(stretches, end)

    def _read(self, stretches: _Stretches, end: Mark) -> TimeSplit:
        seconds = self._marks.seconds
        # Read the whole step first: on a device this waits for the last event, and all others are before it.
        step_s = seconds(stretches.begin, end)
        waits: dict[Part, float] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        for part, begin, finish in stretches.waits:
            waits[part] += seconds(begin, finish)
        totals = {part: -wait for part, wait in waits.items()}
        for part, begin, finish in stretches.parts:
            totals[part] += seconds(begin, finish)
        return TimeSplit(
            step_s=step_s,
            forward_s=totals["forward"],
            backward_s=totals["backward"],
            exposed_communication_s=sum(waits.values()),
            optimizer_s=totals["optimizer"],
        )
