"""Ranks that differ in an optimizer step: one error on all of them, before anything is updated."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import zeroamp
from benchmarks.differences.kinds import STEP
from benchmarks.differences.training import train
from tests.models.small import batch, loss_of
from tests.processes.ranks import Ranks
from tests.processes.training import config, full_parameters, same_bits, wrapped
from zeroamp.training.step import driver_of
from zeroamp.wrapping.state import wrap_state

NAME = "llama_tied"


def _all_kinds():
    found = {}
    for name, kind in STEP.items():
        for stage in kind.stages:
            try:
                found[name, stage] = "", f"{train(kind, stage)} steps"
            except Exception as error:
                found[name, stage] = type(error).__name__, str(error)
    return found


def test_each_kind_is_one_error_on_all_ranks_that_names_it(ranks2):
    first, second = ranks2.run(_all_kinds)
    assert first == second
    wrong = {
        run: (error, text)
        for run, (error, text) in first.items()
        if error != (STEP[run[0]].error or "") or STEP[run[0]].names not in text
    }
    assert wrong == {}


def _train_step(model, **more):
    return zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1, **more))


def _step(train, model, index):
    train.backward(loss_of(model, batch(NAME, dist.get_world_size() * index + dist.get_rank())))
    return train.step()


def _goes_on():
    """Rank 1 steps with another learning rate once; return the texts and the parameters after more steps."""
    model = wrapped(NAME, config(0))
    train = _train_step(model)
    _step(train, model, 0)
    before = full_parameters(model)
    train.optimizers[0].param_groups[0]["lr"] = 0.1 + 0.1 * dist.get_rank()
    with pytest.raises(zeroamp.StepError, match=r"lr of param group 0 is 0\.1 on rank 0, but 0\.2 on rank 1"):
        _step(train, model, 1)
    assert same_bits(full_parameters(model), before) == [], "nothing was updated"
    train.optimizers[0].param_groups[0]["lr"] = 0.1
    return _step(train, model, 1).step, full_parameters(model)


def test_nothing_is_updated_and_ranks_that_agree_again_go_on(ranks2):
    (steps, first), (_, second) = ranks2.run(_goes_on)
    assert steps == 2
    assert same_bits(first, second) == []


class _Numbers(zeroamp.Callback):
    """A callback of a third party, with numbers of its own."""

    def __init__(self, *numbers):
        self.numbers, self.sums = numbers, []

    def statistics(self):
        return self.numbers, self.sums.append


def _callbacks():
    model = wrapped(NAME, config(2))
    train = _train_step(model)
    first, none, last = _Numbers(1.0, dist.get_rank()), _Numbers(), _Numbers(5.0)
    train.callbacks += [first, none, last]
    for index in range(2):
        _step(train, model, index)
    return first.sums, none.sums, last.sums, len(train.callbacks)


def test_a_callback_of_a_third_party_has_its_own_sums(ranks2):
    expected = [[2.0, 1.0]] * 2, [[]] * 2, [[10.0]] * 2, 3
    assert ranks2.run(_callbacks) == [expected] * 2


def _four_ranks(values):
    """Every rank has its own weight decay."""
    model = wrapped(NAME, config(1))
    train = _train_step(model)
    train.optimizers[0].param_groups[0]["weight_decay"] = values[dist.get_rank()]
    with pytest.raises(zeroamp.StepError) as raised:
        _step(train, model, 0)
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
    model = wrapped(NAME, config(3))
    train = _train_step(model)
    driver_of(train).all_reduce.is_late = True
    for index in range(2):
        train.optimizers[0].param_groups[0]["lr"] = 0.1 + 0.1 * (index == 1) * dist.get_rank()
        _step(train, model, index)
    train.optimizers[0].param_groups[0]["lr"] = 0.1
    with pytest.raises(zeroamp.StepError) as raised:
        _step(train, model, 2)
    return str(raised.value)


def test_on_a_device_the_next_step_raises_with_the_values_of_the_step_that_differed(ranks2):
    for text in ranks2.run(_late):
        assert text.startswith(
            "The optimizer step before this one differs between ranks: lr of param group 0 is 0.1 on"
        )


def _numbers():
    """The number of a rank, and what changes it."""
    model = wrapped(NAME, config(3))
    train = _train_step(model, momentum=0.9)
    agreement = driver_of(train)._agreement
    found = [agreement.number(is_late=False)]
    issued = wrap_state(model).issued
    assert issued.step == 2
    for change in (
        lambda: setattr(issued, "num_backwards", 1),
        lambda: issued.calls.append("a call"),
        lambda: setattr(agreement, "done", 1),
        lambda: train.optimizers[0].param_groups[0].update(momentum=0.8),
    ):
        change()
        found.append(agreement.number(is_late=False))
    train.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1)  # not read: it may be on a device
    found.append(agreement.number(is_late=False))
    return [number for (number,), _ in found]


def test_a_number_is_exact_in_fp64_for_all_ranks_and_every_fact_changes_it(ranks2):
    first, second = ranks2.run(_numbers)
    assert first == second
    assert len(set(first)) == len(first)
    assert all(number == int(number) and 0 <= number < 2**52 for number in first)


def _one_rank():
    model = wrapped(NAME, config(3))
    train = _train_step(model)
    _step(train, model, 0)
    return driver_of(train)._agreement, wrap_state(model).issued


def test_one_rank_compares_nothing():
    ranks = Ranks(1)
    assert ranks.run(_one_rank) == [(None, None)]
    ranks.stop()


def _the_other_is_killed(stage):
    model = wrapped(NAME, config(stage))
    train = _train_step(model)
    _step(train, model, 0)
    loss = loss_of(model, batch(NAME, dist.get_rank()))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zeroamp.PeerError) as raised:  # noqa: PT012  # at stage 0 in the one, at stage 3 in the other
        train.backward(loss)
        train.step()
    raise zeroamp.StepError(str(raised.value))  # a body without an answer would have the test wait for the other rank


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        pytest.param(
            0,
            r"all_reduce of blocks\.\d \(\d+ elements, fp32\) over ranks 0, 1 in optimizer step 2",
            marks=pytest.mark.slow,
        ),
        (3, r"all_(gather|to_all) of blocks\.\d \(\d+ elements, bf16\) over ranks 0, 1 in optimizer step 2, where 1"),
    ],
)
def test_where_a_rank_is_lost_the_error_names_the_collective_and_the_step(stage, text):
    ranks = Ranks(2)
    with pytest.raises(AssertionError, match=f"Rank 0 waited for the {text}.*gloo"):
        ranks.run(_the_other_is_killed, stage)
    ranks.stop()
