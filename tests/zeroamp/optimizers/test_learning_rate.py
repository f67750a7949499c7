"""The curves, step by step, against DeepSpeed's formulas written out in `tests.schedules`, bit for bit."""

import math

import pytest

from tests.oracles import learning_rates
from zeroamp.optimizers.scheduler_params import SCHEDULER_PARAMS

INITIAL = 0.3

ORACLES = {
    "WarmupLR": learning_rates.warmup_lr,
    "WarmupDecayLR": learning_rates.warmup_decay_lr,
    "WarmupCosineLR": learning_rates.warmup_cosine_lr,
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


def curve(name, params):
    """Return the learning rate of the first param group as a function of step and initial learning rate."""
    block = SCHEDULER_PARAMS[name].model_validate(params)
    return lambda step, initial: block.lr(step, initial, 0)


@pytest.mark.parametrize(("name", "params", "oracle"), WARMUP, ids=str)
def test_every_step_has_the_learning_rate_of_deepspeed(name, params, oracle):
    expected = learning_rates.take(ORACLES[name](INITIAL, **oracle))
    assert [curve(name, params)(step, INITIAL) for step in range(1000)] == expected
    assert len(set(expected)) > (1 if params.get("warmup_num_steps") == 1 else 20), "the curve moves"


def test_the_first_steps_are_those_of_deepspeeds_constructors():
    cosine = curve("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_min_ratio": 0.5})
    assert [cosine(step, 1.0) for step in (0, 1)] == [0.0, 0.5]
    warmup = curve("WarmupLR", {"warmup_min_lr": 0.25, "warmup_num_steps": 10})
    assert warmup(0, 1.0) == warmup(1, 1.0) == 0.25 < warmup(2, 1.0)


def test_the_curves_end_where_their_names_say():
    assert curve("WarmupLR", {"warmup_max_lr": 0.1})(10**6, INITIAL) == 0.1
    assert curve("WarmupDecayLR", {"total_num_steps": 2000, "warmup_min_lr": 0.1})(10**6, INITIAL) == 0.1
    assert math.isclose(curve("WarmupCosineLR", {"total_num_steps": 2000})(10**6, INITIAL), INITIAL * 0.0001)
