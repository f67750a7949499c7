"""A slow rank is warned of when it should be, once, and not before."""

import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.processes.training import config
from tests.zeroamp.reporting.runs import take_steps, train_step
from zeroamp.reporting import slow_rank
from zeroamp.reporting.slow_rank import STEPS_PER_CHECK, SlowRankCheck


def warned(*busy_s):
    """What is warned of if the ranks were so busy."""
    lines = []
    SlowRankCheck(0, len(busy_s), lines.append)._look(busy_s)
    return lines


def test_a_rank_that_is_slower_than_the_others_is_warned_of():
    assert warned(1.0, 1.1, 1.0, 1.19) == warned(1.0, 0.0, 1.5, 1.0) == []  # rank 1 has closed its report
    (line,) = warned(1.0, 1.0, 1.5, 1.0)
    assert line.startswith(
        "rank 2 was busy for 1500.0 ms per step (median of the last 50 steps), 50% above the median of the ranks"
    )


def test_a_rank_says_its_median_without_the_first_step_so_that_one_hiccup_makes_none_slow():
    said = []
    check = SlowRankCheck(0, 1, said.append)
    hiccup = [60.0, *[0.02] * 20, 1.5, *[0.02] * 28]
    for busy_s in (*hiccup, *[0.03] * (STEPS_PER_CHECK + 1)):
        if numbers := check.statistics()[0]:
            said.append(numbers)
        check.add(busy_s)
    assert said == [[0.02]]
    assert check.statistics()[0] == [0.03]


def _slow_second_rank(path):
    """The exchange over ranks: the second one says that it was busy three times as long."""
    slow_rank.STEPS_PER_CHECK = 2
    train = train_step(config(3))
    with log_lines() as lines, zeroamp.RunReport(train, path) as run:
        add = run._check.add
        run._check.add = lambda _busy_s: add(3.0 if dist.get_rank() == 1 else 1.0)
        take_steps(train, 7)
    return [line for line in lines if line.startswith("slow rank")]


def test_the_ranks_times_are_exchanged_and_the_first_rank_warns_once(ranks2, tmp_path):
    first, second = ranks2.run(_slow_second_rank, str(tmp_path / "run.jsonl"))
    assert second == []
    (line,) = first
    assert line.startswith(
        "slow rank: rank 1 was busy for 3000.0 ms per step (median of the last 2 steps), 50% above the median"
    )
    assert [name for name, _ in zeroamp.read_run(tmp_path / "run.jsonl").warnings] == ["slow rank"]


def _leaves_alone(path):
    """One rank closes its report, after an error of its own, and trains on with the others."""
    slow_rank.STEPS_PER_CHECK = 2
    train = train_step(config(3))
    with log_lines() as lines, zeroamp.RunReport(train, path) as run:
        take_steps(train, 2)
        if dist.get_rank() == 1:
            run.close()
        take_steps(train, 4)
    return train.num_steps, [line for line in lines if line.startswith("slow rank")]


def test_a_rank_that_closes_its_report_alone_stays_in_the_exchange(ranks2, tmp_path):
    assert ranks2.run(_leaves_alone, str(tmp_path / "run.jsonl")) == [(6, [])] * 2
