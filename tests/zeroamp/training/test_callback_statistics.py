"""Statistics of callbacks: in the one all-reduce of a step, read in the same step or, off the CPU, in the next."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from zeroamp.training.step import driver_of
from zeroamp.wrapping.state import wrap_state

NAME = "llama_tied"


class _Part(zeroamp.Callback):
    def __init__(self, name, numbers, got):
        self.name, self.numbers, self.got = name, numbers, got

    def statistics(self):
        return self.numbers, lambda values: self.got.append((self.name, values))


def _handed_out(is_late):
    """What the callbacks got in two steps, by name."""
    model, train = _training(is_late=is_late)
    got = []
    train.callbacks.append(_Part("b", [], got))
    wrap_state(model).callbacks.append(_Part("a", [1.0], got))  # those of the model come first
    for step in range(2):
        if step == 1:  # asked for in this step only
            train.callbacks.append(_Part("c", [2.0, 3.0], got))
        _take_step(model, train, step)
    return got


@pytest.mark.parametrize("is_late", [False, True])
def test_callbacks_get_the_sums_of_their_numbers_in_the_same_step_or_one_late(ranks2, is_late):
    first, second = [("a", [2.0]), ("b", [])], [("a", [2.0]), ("b", []), ("c", [4.0, 6.0])]
    assert ranks2.run(_handed_out, is_late) == [first if is_late else first + second] * 2


def _training(*, is_late=False):
    """`is_late`: whether sums are read one step late, as on a device."""
    model = wrapped(NAME, config(3))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    driver_of(train).all_reduce.is_late = is_late
    return model, train


def _take_step(model, train, index=0):
    train.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
    return train.step()
