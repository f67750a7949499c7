"""The clock of a step, by hand; and every collective of FSDP2 is inside a stretch that it counts as communication."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.counting import Collectives
from zeroamp.hooks._torch.fsdp import communication_methods
from zeroamp.reporting.step_clock import StepClock, time_communication


def clock_of(*times):
    clock = StepClock("cpu")
    clock._now = iter(times).__next__
    return clock


def test_communication_is_taken_out_of_the_part_it_is_in():
    clock = clock_of(10, 11, 13, 20, 22, 23, 28, 30, 34, 40, 45)
    communicate = clock.timed(lambda: None)
    with clock.inside("forward"):  # 10
        clock.timed(communicate)()  # 11 to 13: one inside another is one
    communicate()  # after 20, outside of the parts: an evaluation's
    with clock.inside("backward"):  # 22
        communicate()  # 23 to 28
    with clock.inside("optimizer"):  # 34
        pass  # 40
    assert clock.end_step()() == {
        "forward": 8,
        "backward": 3,
        "exposed_communication": 7,
        "optimizer": 6,
        "other": 11,
    }


def test_a_step_begins_where_the_one_before_ended():
    """A step begins where the one before ended and an error ends a part."""
    clock = clock_of(1, 2, 5, 7, 8, 11)
    with clock.inside("forward"):
        pass
    assert sum(clock.end_step()().values()) == 4
    with pytest.raises(ValueError, match="asked for"), clock.inside("forward"):
        raise ValueError("asked for")
    assert clock.end_step()() == dict.fromkeys(("backward", "exposed_communication", "optimizer"), 0) | {
        "forward": 1,
        "other": 5,
    }


def test_on_an_accelerator_marks_are_events(monkeypatch):
    """On an accelerator marks are events and nothing waits before they are read."""
    times, is_over = itertools.count(), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.milliseconds = 1000.0 * next(times)

        def synchronize(self):
            is_over.append(self.milliseconds)

        def elapsed_time(self, end):
            assert end.milliseconds <= max(is_over)
            return end.milliseconds - self.milliseconds

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Event))
    clock = StepClock("cuda")
    for part in ("forward", "optimizer"):
        with clock.inside(part):
            pass
    read = clock.end_step()
    assert is_over == []
    seconds = read()
    assert (seconds["forward"], seconds["optimizer"], sum(seconds.values())) == (1.0, 1.0, 4.0)


def _watched_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    clock, outside = StepClock("cpu"), []

    class Seen(Collectives):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d" and clock._part != "exposed_communication":
                outside.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

    restore = time_communication(model, clock)
    with Seen() as seen, clock.inside("forward"):
        model(torch.ones(2, 4)).sum().backward()
    restore()
    left = [name for owner, name in communication_methods(model) if name in vars(owner)]
    return sum(seen.calls.values()), outside, left


def test_every_collective_is_counted_as_communication_until_the_methods_are_restored(ranks2):
    for num_calls, outside, left in ranks2.run(_watched_step):
        assert num_calls >= 2
        assert (outside, left) == ([], [])
