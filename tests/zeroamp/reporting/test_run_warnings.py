"""Each warning comes when it should, once, and not before."""

import math
from functools import partial

import pytest
import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import batch, loss_of
from tests.processes.training import config, policy
from tests.zeroamp.reporting.records import record
from tests.zeroamp.reporting.runs import NAME, take_steps, train_step
from zeroamp.reporting.run_report import _RankCheck
from zeroamp.reporting.run_warnings import NUM_BAD_STEPS, RunWarnings


def warnings_of(look):
    """What is logged while `look` is called with a RunWarnings, and what its listener is told."""
    told = []
    warnings = RunWarnings(policy(config(3)), lambda name, text: told.append(f"{name}: {text}"))
    with log_lines() as lines:
        look(warnings)
    assert told == lines
    return lines


def steps(*records):
    return lambda warnings: [warnings.step(each) for each in records]


@pytest.mark.parametrize(
    ("norm", "name"), [(0.0, "zero gradients"), (math.nan, "non-finite gradients"), (math.inf, "non-finite gradients")]
)
def test_gradients_that_stay_useless_are_warned_of_once(norm, name):
    bad = [record(step, grad_norm=norm) for step in range(1, NUM_BAD_STEPS + 1)]
    assert warnings_of(steps(*bad[:-1])) == []
    assert warnings_of(steps(*bad[:-1], record(), bad[-1])) == []
    (line,) = warnings_of(steps(*bad, *bad))
    assert line.startswith(f"{name}: gradient norm {norm} for {NUM_BAD_STEPS} steps in a row, the last after step 10")


def _overflowing(path, marks, **fields):
    """What is warned of after each step, "x" where one overflows, and how the last one ended."""
    train = train_step(config(3, dtype="float16", fp16={"min_loss_scale": 4, **fields}))
    told, error = [], None
    with log_lines() as lines, zeroamp.RunReport(train, path):
        for index, mark in enumerate(marks):
            train.backward(loss_of(train.model, batch(NAME, index)) * (1e30 if mark == "x" else 1.0))
            try:
                train.step()
            except zeroamp.StepError as raised:
                error = str(raised)
            told.append([line.partition(": an ")[0] for line in lines if line.startswith("loss scale")])
    return told, error


def test_the_loss_scale_at_its_minimum_is_warned_of_once_and_when_the_next_overflow_ends_the_run(ranks2, tmp_path):
    line = "loss scale at minimum: overflows have brought the loss scale to fp16.min_loss_scale 4 and used up its"
    line += " hysteresis by step"
    path = str(tmp_path / "run.jsonl")
    (told, error), (others, other_error) = ranks2.run(
        partial(_overflowing, initial_scale_power=2, hysteresis=2), path, "..x.x"
    )
    assert told == [[], [], *[[f"{line} 2"]] * 3]
    assert others == [[]] * 5
    assert "overflowed at the loss scale 4" in error
    assert error == other_error
    told, error = ranks2.run(partial(_overflowing, initial_scale_power=3, hysteresis=1), path, ".x")[0]
    assert (told, error) == ([[], [f"{line} 1"]], None)


def ranks(busy_s, num_flushes=(0, 0, 0, 0)):
    return lambda warnings: [warnings.look_at_ranks(busy_s, num_flushes, 50) for _ in range(2)]


def test_a_rank_that_is_slower_than_the_others_is_warned_of_once():
    assert warnings_of(ranks([1.0, 1.1, 1.0, 1.19])) == []
    (line,) = warnings_of(ranks([1.0, 1.0, 1.5, 1.0]))
    assert line.startswith(
        "slow rank: rank 2 was busy for 1500.0 ms per step (median of the last 50 steps), 50% above the median"
    )


def test_flushes_of_the_allocator_are_warned_of_once():
    (line,) = warnings_of(ranks([1.0] * 4, (0, 3, 0, 0)))
    assert line.startswith("allocator flushes: rank 1 flushed its allocator's cache 3 times in the last 50 steps")


def exchanged(busy_s, every):
    """What a rank with these busy times says of itself, in each exchange, up to the step after the last one."""
    said = []
    check = _RankCheck(0, 1, None, every)
    for step, value in enumerate([*busy_s, 0.0], start=1):
        numbers, receive = check.statistics()
        if numbers:
            said.append(tuple(numbers))
        receive(numbers)
        check.step(record(step, step_s=value, exposed_communication_s=0.0, num_alloc_retries=3 * step))
    return said


def test_a_rank_says_its_median_without_the_first_step_so_that_one_hiccup_makes_none_slow():
    hiccup = [0.02] * 20 + [1.5] + [0.02] * 29
    assert exchanged([60.0, *hiccup], 50) == [(0.02, 150)]
    assert exchanged([60.0, 1.0, 1.0, 5.0, 3.0, 3.0], 2) == [(1.0, 6), (4.0, 6)]


def _slow_second_rank(path):
    """The exchange over ranks: the second one says that it was busy three times as long."""
    train = train_step(config(3))
    with log_lines() as lines, zeroamp.RunReport(train, path, steps_per_check=2) as run:
        statistics = run._check.statistics
        run._check.statistics = lambda: _slowed(*statistics())
        take_steps(train, 5)
    return [line for line in lines if line.startswith("slow rank")]


def _slowed(numbers, receive):
    if numbers:
        assert [index for index, number in enumerate(numbers) if number] == [dist.get_rank()]
        numbers[dist.get_rank()] = 3.0 if dist.get_rank() == 1 else 1.0
    return numbers, receive


def test_the_ranks_times_are_exchanged_and_the_first_rank_warns(ranks2, tmp_path):
    first, second = ranks2.run(_slow_second_rank, str(tmp_path / "run.jsonl"))
    assert second == []
    (line,) = first
    assert line.startswith(
        "slow rank: rank 1 was busy for 3000.0 ms per step (median of the last 2 steps), 50% above the median"
    )
    assert [name for name, _ in zeroamp.read_run(tmp_path / "run.jsonl").warnings] == ["slow rank"]


def _leaves_alone(path):
    """One rank closes its report, after an error of its own, and trains on with the others."""
    train = train_step(config(3))
    with log_lines() as lines, zeroamp.RunReport(train, path, steps_per_check=2) as run:
        take_steps(train, 2)
        if dist.get_rank() == 1:
            run.close()
        take_steps(train, 4)
    return train.num_steps, [line for line in lines if line.startswith("slow rank")]


def test_a_rank_that_closes_its_report_alone_stays_in_the_exchange(ranks2, tmp_path):
    assert ranks2.run(_leaves_alone, str(tmp_path / "run.jsonl")) == [(6, [])] * 2
