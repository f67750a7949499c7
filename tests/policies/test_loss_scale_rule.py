"""The loss scale's state machine, walked to its edges."""

import pytest
import torch

from zeroamp import policy_from_config
from zeroamp.policies.loss_scale_rule import LossScale


def walk(config, overflows):
    """Return the states after each step; `overflows` is a string of "x" (overflow) and "." (good)."""
    state, states = config.start(), []
    for mark in overflows:
        state = config.after(state, overflow=mark == "x")
        states.append(state)
    return states


@pytest.mark.parametrize(
    ("config", "overflows", "scales", "hysteresis_left"),
    [
        (LossScale(initial=256.0, hysteresis=3), "xxxx", [256.0, 256.0, 128.0, 64.0], [2, 1, 1, 1]),
        (LossScale(initial=256.0, hysteresis=2), "x.x.x", [256.0, 256.0, 128.0, 128.0, 64.0], None),
        (
            LossScale(initial=256.0, hysteresis=2, consecutive_hysteresis=True),
            "x.x.xx",
            [256.0, 256.0, 256.0, 256.0, 256.0, 128.0],
            None,
        ),
        # As DeepSpeed counts: the first doubling is on step window + 1, then every window.
        (LossScale(initial=256.0, window=2, hysteresis=2), ".....", [256.0, 256.0, 512.0, 512.0, 1024.0], None),
        (
            LossScale(initial=256.0, window=2, hysteresis=2),
            "x....",
            [256.0, 256.0, 256.0, 512.0, 512.0],
            [1, 1, 1, 2, 2],
        ),
        (
            LossScale(initial=256.0, window=2, hysteresis=1),
            "..x...",
            [256.0, 256.0, 128.0, 128.0, 128.0, 256.0],
            None,
        ),
        (LossScale(initial=128.0, dynamic=False, hysteresis=1), "xx.....", [128.0] * 7, None),
    ],
    ids=[
        "the first overflows only use up the hysteresis",
        "good steps do not refill the hysteresis",
        "consecutive hysteresis is refilled",
        "doubles after a window",
        "a doubling refills the hysteresis",
        "an overflow starts the window again",
        "a fixed scale never moves",
    ],
)
def test_the_scale_moves_as_deepspeeds(config, overflows, scales, hysteresis_left):
    states = walk(config, overflows)
    assert [state.scale for state in states] == scales
    assert hysteresis_left in (None, [state.hysteresis_left for state in states])


def test_it_stops_at_the_minimum_and_says_when_nothing_is_left():
    config = LossScale(initial=4.0, minimum=3.0, hysteresis=1)
    states = walk(config, "xx")
    assert [state.scale for state in states] == [3.0, 3.0]
    assert not config.is_exhausted(config.start())
    assert config.is_exhausted(states[0])
    with_hysteresis = LossScale(initial=1.0, minimum=1.0, hysteresis=2)
    assert not with_hysteresis.is_exhausted(with_hysteresis.start())
    assert with_hysteresis.is_exhausted(walk(with_hysteresis, "x")[0])
    fixed = LossScale(initial=128.0, dynamic=False, hysteresis=1)
    assert not fixed.is_exhausted(walk(fixed, "xxx")[-1])


def test_it_stops_growing_where_torchs_grad_scaler_does():
    config = LossScale(initial=2.0**124, window=1)
    scale, tracker = torch.tensor(config.initial), torch.zeros((), dtype=torch.int32)
    expected = [config.initial]  # DeepSpeed's rule doubles one step later
    for _ in range(6):
        torch._amp_update_scale_(scale, tracker, torch.zeros(()), 2.0, 0.5, 1)
        expected.append(float(scale))
    assert [state.scale for state in walk(config, ".......")] == expected
    assert expected[-1] == 2.0**127


FIELDS = {"initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 3, "min_loss_scale": 2}


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({"fp16": {"enabled": True}}, LossScale(initial=65536.0, window=1000, hysteresis=2, minimum=1.0)),
        ({"fp16": {"enabled": True, **FIELDS}}, LossScale(initial=256.0, window=5, hysteresis=3, minimum=2.0)),
        (
            {"fp16": FIELDS, "torch_autocast": {"enabled": True, "dtype": "float16"}},
            LossScale(initial=256.0, window=5, hysteresis=3, minimum=2.0),
        ),
        ({"fp16": {"enabled": True, "loss_scale": 512}}, LossScale(initial=512.0, dynamic=False)),
    ],
    ids=["DeepSpeed's defaults", "fp16", "float16 autocast", "fixed"],
)
def test_the_fields_of_the_fp16_block_make_the_scale(cfg, expected):
    assert policy_from_config(cfg).loss_scale == expected
