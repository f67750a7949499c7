"""Statistics of callbacks: in the one all-reduce of a step, read in the same step or, off the CPU, in the next."""

import pytest
import torch.distributed as dist

import zeroamp
from tests.processes.training import SmallTraining, config
from zeroamp.training.step import driver_of
from zeroamp.wrapping.state import wrap_state


class _Part(zeroamp.Callback):
    """A callback of a third party, with numbers of its own."""

    def __init__(self, name, numbers, got):
        self.name, self.numbers, self.got = name, numbers, got

    def statistics(self):
        return self.numbers, lambda values: self.got.append((self.name, values))


def _handed_out(is_late):
    """What the callbacks got in two steps, by name. `is_late`: whether sums are read one step late, as on a device."""
    training = SmallTraining(config(3))
    driver_of(training.train).all_reduce.is_late = is_late
    got = []
    training.train.callbacks.append(_Part("b", [], got))
    wrap_state(training.model).callbacks.append(_Part("a", [1.0, dist.get_rank()], got))  # those of the model first
    for step in range(2):
        if step == 1:  # asked for in this step only
            training.train.callbacks.append(_Part("c", [2.0, 3.0], got))
        training.step(step)
    return got


@pytest.mark.parametrize("is_late", [False, True])
def test_callbacks_get_the_sums_of_their_numbers_in_the_same_step_or_one_late(ranks2, is_late):
    first, second = [("a", [2.0, 1.0]), ("b", [])], [("a", [2.0, 1.0]), ("b", []), ("c", [4.0, 6.0])]
    assert ranks2.run(_handed_out, is_late) == [first if is_late else first + second] * 2
