"""The clock of a step, by hand: its parts do not overlap, whatever the marks are."""

import pytest
import torch

from zeroamp.reporting.clock import DeviceMarks, StepClock


class Ticks:
    """Marks that are as far apart as a list says."""

    def __init__(self, *times):
        self._times = iter(times)

    def now(self):
        return next(self._times)

    def seconds(self, begin, end):
        return end - begin


def clock_of(*times):
    clock = StepClock("cpu")
    clock._marks = Ticks(*times)
    return clock


def test_communication_is_taken_out_of_the_part_it_is_in():
    clock = clock_of(10, 11, 13, 20, 22, 23, 28, 30, 34, 40)
    clock.enter("forward")  # 10
    clock.enter_communication()  # 11
    clock.leave_communication()  # 13
    clock.leave()  # 20
    clock.enter_communication()  # outside of the parts: an evaluation's
    clock.leave_communication()
    clock.enter("backward")  # 22
    clock.enter_communication()  # 23
    clock.leave_communication()  # 28
    clock.leave()  # 30
    clock.enter("optimizer")  # 34
    clock.leave()  # 40
    clock._marks = Ticks(45)
    split = clock.end_step()()
    assert (split.forward_s, split.backward_s, split.optimizer_s) == (8, 3, 6)
    assert (split.exposed_communication_s, split.step_s) == (7, 35)


def test_a_step_begins_where_the_one_before_ended():
    clock = clock_of(1, 2, 5, 7, 8, 11)
    clock.enter("forward")
    clock.leave()
    assert clock.end_step()().step_s == 4
    clock.enter("forward")
    clock.leave()
    assert clock.end_step()().step_s == 6


class Event:
    """Stands in for an event of an accelerator: it is not over before it was waited for."""

    count = 0

    def __init__(self, enable_timing):
        assert enable_timing
        self.is_over = False

    def record(self):
        Event.count += 1
        self.milliseconds = 1000.0 * Event.count

    def synchronize(self):
        self.is_over = True

    def elapsed_time(self, end):
        assert end.is_over
        return end.milliseconds - self.milliseconds


def test_on_an_accelerator_marks_are_events_and_nothing_waits_before_they_are_read(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: type("Module", (), {"Event": Event}))
    clock = StepClock("cuda")
    assert not clock.is_immediate
    assert isinstance(clock._marks, DeviceMarks)
    clock.enter("forward")
    clock.leave()
    clock.enter("optimizer")
    clock.leave()
    begin = clock._stretches.begin
    read = clock.end_step()
    assert not begin.is_over
    assert (read().step_s, read().forward_s, read().optimizer_s) == (4.0, 1.0, 1.0)


def test_a_step_without_any_part_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="expected a step in which some part ran"):
        StepClock("cpu").end_step()
