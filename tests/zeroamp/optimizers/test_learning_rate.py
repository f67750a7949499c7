"""The curves, step by step, against DeepSpeed's formulas written out in `tests.schedules`, bit for bit."""

import math

import pytest

from tests.oracles import learning_rates
from zeroamp.optimizers import learning_rate
from zeroamp.optimizers.scheduler_params import SCHEDULER_PARAMS

INITIAL = 0.3
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}

ORACLES = {
    "WarmupLR": learning_rates.warmup_lr,
    "WarmupDecayLR": learning_rates.warmup_decay_lr,
    "WarmupCosineLR": learning_rates.warmup_cosine_lr,
    "LRRangeTest": learning_rates.lr_range_test,
}
# Our keys, and what the oracle calls them.
WARMUP = [
    ("WarmupLR", {}, {}),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-4, "warmup_max_lr": 0.02, "warmup_num_steps": 137, "warmup_type": "linear"},
        {"lo": 1e-4, "hi": 0.02, "steps": 137, "kind": "linear"},
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.5, "warmup_max_lr": 0.1, "warmup_num_steps": 300},
        {"lo": 0.5, "hi": 0.1, "steps": 300},
    ),
    ("WarmupLR", {"warmup_num_steps": 1}, {"steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 1500}, {"total": 1500}),
    (
        "WarmupDecayLR",
        {"total_num_steps": 900, "warmup_min_lr": 1e-3, "warmup_max_lr": 0.1, "warmup_num_steps": 100},
        {"total": 900, "lo": 1e-3, "hi": 0.1, "steps": 100},
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 700, "warmup_num_steps": 77, "warmup_type": "linear"},
        {"total": 700, "steps": 77, "kind": "linear"},
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 50, "warmup_num_steps": 77},
        {"total": 50, "steps": 77},
    ),
    ("WarmupCosineLR", {"total_num_steps": 1500}, {"total": 1500}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 800, "warmup_min_ratio": 0.1, "warmup_num_steps": 60, "cos_min_ratio": 0.02},
        {"total": 800, "lo": 0.1, "steps": 60, "end": 0.02},
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 400, "warmup_num_steps": 33, "warmup_type": "linear"},
        {"total": 400, "steps": 33, "kind": "linear"},
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 30, "warmup_num_steps": 60},
        {"total": 30, "steps": 60},
    ),
]
RANGE_TEST = [
    ("LRRangeTest", {}, {}),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 37, "lr_range_test_step_rate": 0.3},
        {"lo": 1e-4, "size": 37, "rate": 0.3},
    ),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 37, "lr_range_test_step_rate": 5, "lr_range_test_staircase": True},
        {"size": 37, "rate": 5, "staircase": True},
    ),
]
ONE_CYCLE = [
    {},
    {"first": 100},
    {"first": 100, "second": 333, "decay_size": 10, "rate": 0.1},
    {"first": 33.5, "second": 12.25, "decay_size": 7.5, "rate": 0.25},
    {"first": 333, "second": 250, "stairs": 5, "decay_size": 10, "rate": 0.0},
    {"first": 100, "second": 70, "stairs": 4, "second_stairs": 7},
    {"first": 100, "stairs": 5, "second_stairs": 0},
    {"first": 100, "second": 90, "stairs": -1, "second_stairs": 3, "rate": 0.1},
    {"first": 90, "second": 0, "stairs": 4, "decay_size": 100, "rate": 1.0},
]
KEYS = {
    "first": "cycle_first_step_size",
    "second": "cycle_second_step_size",
    "stairs": "cycle_first_stair_count",
    "second_stairs": "cycle_second_stair_count",
    "decay_size": "decay_step_size",
}


def curve(name, params):
    keys = SCHEDULER_PARAMS[name].model_validate(params).model_dump(exclude={"last_batch_iteration"})
    return getattr(learning_rate, name)(**keys)


@pytest.mark.parametrize(("name", "params", "oracle"), WARMUP + RANGE_TEST, ids=str)
def test_every_step_has_the_learning_rate_of_deepspeed(name, params, oracle):
    expected = learning_rates.take(ORACLES[name](INITIAL, **oracle))
    assert [curve(name, params).lr(step, INITIAL) for step in range(1000)] == expected
    assert len(set(expected)) > (1 if params.get("warmup_num_steps") == 1 else 20), "the curve moves"


@pytest.mark.parametrize("shape", ONE_CYCLE, ids=str)
def test_every_step_of_one_cycle_has_the_learning_rate_of_deepspeed(shape):
    params = {KEYS[key]: value for key, value in shape.items() if key != "rate"}
    cycle = curve("OneCycle", {**CYCLE, **params, "decay_lr_rate": shape.get("rate", 0.0)})
    expected = learning_rates.take(learning_rates.one_cycle(1e-4, 1e-2, **shape))
    assert [cycle.lr(step, INITIAL) for step in range(1000)] == expected


@pytest.mark.parametrize("shape", ONE_CYCLE, ids=str)
def test_every_step_of_one_cycle_has_the_momentum_of_deepspeed(shape):
    params = {KEYS[key]: value for key, value in shape.items() if key != "rate"}
    momenta = {"cycle_min_mom": 0.7, "cycle_max_mom": 0.95, "decay_mom_rate": shape.get("rate", 0.0)}
    cycle = curve("OneCycle", {**CYCLE, **params, **momenta})
    expected = learning_rates.take(learning_rates.one_cycle_momentum(0.7, 0.95, **shape))
    assert [cycle.momentum(step) for step in range(1000)] == expected


def test_one_cycle_without_momentum_has_none():
    assert curve("OneCycle", {**CYCLE, "cycle_momentum": False}).momentum(3) is None


def test_the_first_steps_are_those_of_deepspeeds_constructors():
    cosine = curve("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_min_ratio": 0.5})
    assert [cosine.lr(step, 1.0) for step in (0, 1)] == [0.0, 0.5]
    warmup = curve("WarmupLR", {"warmup_min_lr": 0.25, "warmup_num_steps": 10})
    assert warmup.lr(0, 1.0) == warmup.lr(1, 1.0) == 0.25 < warmup.lr(2, 1.0)
    cycle = curve("OneCycle", {**CYCLE, "cycle_first_step_size": 10})
    assert (cycle.momentum(0), cycle.momentum(1)) == (0.8, pytest.approx(0.89))


def test_the_curves_end_where_their_names_say():
    assert curve("WarmupLR", {"warmup_max_lr": 0.1}).lr(10**6, INITIAL) == 0.1
    assert curve("WarmupDecayLR", {"total_num_steps": 2000, "warmup_min_lr": 0.1}).lr(10**6, INITIAL) == 0.1
    assert math.isclose(curve("WarmupCosineLR", {"total_num_steps": 2000}).lr(10**6, INITIAL), INITIAL * 0.0001)
