"""The one all-reduce of an optimizer step: ranks that differ get one error, callbacks the sums of their numbers.

`tests/zeroamp/wrapping/test_run_alike.py` has all kinds of differences.
"""

import os
import signal

import pytest
import torch.distributed as dist

import zeroamp
from tests.processes.ranks import Ranks
from tests.processes.training import SmallTraining, config
from zeroamp.training.step import step_of
from zeroamp.wrapping.state import wrap_state


def _four_ranks(values):
    """Every rank has its own weight decay."""
    training = SmallTraining(config(1))
    training.optimizer.param_groups[0]["weight_decay"] = values[dist.get_rank()]
    with pytest.raises(zeroamp.StepError) as raised:
        training.step()
    return str(raised.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.1, 0.2, 0.3, 0.2), "is 0.1 on rank 0, but 0.2 on ranks 1, 3 and 0.3 on rank 2"),  # two are the mean
        ((0.1, 0.1, 0.2, 0.2), "is 0.1 on ranks 0, 1, but 0.2 on ranks 2, 3"),
    ],
)
def test_ranks_whose_value_is_the_mean_of_all_differ_too(ranks4, values, text):
    texts = ranks4.run(_four_ranks, values)
    assert len(set(texts)) == 1
    assert text in texts[0]


def _late():
    training = SmallTraining(config(3))
    group = training.optimizer.param_groups[0]
    step_of(training.train).all_reduce.is_late = True
    for index in range(2):
        group["lr"] = 0.1 + 0.1 * (index == 1) * dist.get_rank()
        training.step(index)
    group["lr"] = 0.1
    with pytest.raises(zeroamp.StepError) as raised:
        training.step(2)
    return str(raised.value)


def test_on_a_device_the_next_step_raises(ranks2):
    """On a device the next step raises with the values of the step that differed."""
    for text in ranks2.run(_late):
        assert text.startswith(
            "The optimizer step before this one differs between ranks: lr of param group 0 is 0.1 on"
        )


def _the_other_is_killed():
    training = SmallTraining(config(3))
    training.step()
    loss = training.loss()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zeroamp.PeerError) as raised:
        training.train.backward(loss)
    raise zeroamp.StepError(str(raised.value))  # a body without an answer would have the test wait for the other rank


def test_a_lost_rank_names_the_collective_and_the_step():
    """Where a rank is lost the error names the collective and the step."""
    ranks = Ranks(2)
    collective = (
        r"all_(gather|to_all) of blocks\.\d \(\d+ elements, bf16\) over ranks 0, 1 in optimizer step 2, where 1"
    )
    with pytest.raises(AssertionError, match=f"Rank 0 waited for the {collective}.*gloo"):
        ranks.run(_the_other_is_killed)
    ranks.stop()


class _Part(zeroamp.Callback):
    """A callback of a third party, with numbers of its own."""

    def __init__(self, name, numbers, got):
        self.name, self.numbers, self.got = name, numbers, got

    def statistics(self):
        return self.numbers, lambda values: self.got.append((self.name, values))


def _handed_out(is_late):
    """What the callbacks got in two steps, by name. `is_late`: whether sums are read one step late, as on a device."""
    training = SmallTraining(config(3))
    step_of(training.train).all_reduce.is_late = is_late
    got = []
    training.train.callbacks.append(_Part("b", [], got))
    wrap_state(training.model).callbacks.append(_Part("a", [1.0, dist.get_rank()], got))  # those of the model first
    for step in range(2):
        if step == 1:  # asked for in this step only
            training.train.callbacks.append(_Part("c", [2.0, 3.0], got))
        training.step(step)
    return got


@pytest.mark.parametrize("is_late", [False, True])
def test_callbacks_get_the_sums_of_their_numbers(ranks2, is_late):
    """Callbacks get the sums of their numbers in the same step or one late."""
    first, second = [("a", [2.0, 1.0]), ("b", [])], [("a", [2.0, 1.0]), ("b", []), ("c", [4.0, 6.0])]
    assert ranks2.run(_handed_out, is_late) == [first if is_late else first + second] * 2
