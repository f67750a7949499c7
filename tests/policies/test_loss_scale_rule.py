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


def scales(config, overflows):
    return [state.scale for state in walk(config, overflows)]


def test_the_first_overflows_only_use_up_the_hysteresis():
    config = LossScale(initial=256.0, hysteresis=3)
    states = walk(config, "xxxx")
    assert [state.scale for state in states] == [256.0, 256.0, 128.0, 64.0]
    assert [state.hysteresis_left for state in states] == [2, 1, 1, 1]


def test_good_steps_do_not_refill_the_hysteresis_unless_consecutive():
    assert scales(LossScale(initial=256.0, hysteresis=2), "x.x.x") == [256.0, 256.0, 128.0, 128.0, 64.0]
    consecutive = LossScale(initial=256.0, hysteresis=2, consecutive_hysteresis=True)
    assert scales(consecutive, "x.x.xx") == [256.0, 256.0, 256.0, 256.0, 256.0, 128.0]


def test_it_doubles_after_a_window_and_refills_the_hysteresis():
    # As DeepSpeed counts: the first doubling is on step window + 1, then every window.
    config = LossScale(initial=256.0, window=2, hysteresis=2)
    assert scales(config, ".....") == [256.0, 256.0, 512.0, 512.0, 1024.0]
    states = walk(config, "x....")
    assert [state.scale for state in states] == [256.0, 256.0, 256.0, 512.0, 512.0]
    assert [state.hysteresis_left for state in states] == [1, 1, 1, 2, 2]


def test_an_overflow_starts_the_window_again():
    assert scales(LossScale(initial=256.0, window=2, hysteresis=1), "..x...") == [
        256.0,
        256.0,
        128.0,
        128.0,
        128.0,
        256.0,
    ]


def test_it_stops_at_the_minimum_and_says_when_nothing_is_left():
    config = LossScale(initial=4.0, minimum=3.0, hysteresis=1)
    states = walk(config, "xx")
    assert [state.scale for state in states] == [3.0, 3.0]
    assert not config.is_exhausted(config.start())
    assert config.is_exhausted(states[0])


def test_the_hysteresis_comes_before_exhaustion():
    config = LossScale(initial=1.0, minimum=1.0, hysteresis=2)
    assert not config.is_exhausted(config.start())
    assert config.is_exhausted(walk(config, "x")[0])


def test_it_stops_growing_where_torchs_grad_scaler_does():
    config = LossScale(initial=2.0**124, window=1)
    scale, tracker = torch.tensor(config.initial), torch.zeros((), dtype=torch.int32)
    expected = [config.initial]  # DeepSpeed's rule doubles one step later
    for _ in range(6):
        torch._amp_update_scale_(scale, tracker, torch.zeros(()), 2.0, 0.5, 1)
        expected.append(float(scale))
    assert scales(config, ".......") == expected
    assert expected[-1] == 2.0**127


def test_a_fixed_scale_never_moves_and_is_never_exhausted():
    config = LossScale(initial=128.0, dynamic=False, hysteresis=1)
    assert scales(config, "xx.....") == [128.0] * 7
    assert not config.is_exhausted(walk(config, "xxx")[-1])


FIELDS = {"initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 3, "min_loss_scale": 2}


@pytest.mark.parametrize(
    "cfg",
    [
        {"fp16": {"enabled": True, **FIELDS}},
        {"fp16": FIELDS, "torch_autocast": {"enabled": True, "dtype": "float16"}},
    ],
)
def test_the_fields_of_the_fp16_block_apply_to_float16_autocast_too(cfg):
    assert policy_from_config(cfg).loss_scale == LossScale(initial=256.0, window=5, hysteresis=3, minimum=2.0)


def test_defaults_are_deepspeeds():
    expected = LossScale(initial=65536.0, window=1000, hysteresis=2, consecutive_hysteresis=False, minimum=1.0)
    assert policy_from_config({"fp16": {"enabled": True}}).loss_scale == expected


def test_a_loss_scale_other_than_zero_is_fixed():
    policy = policy_from_config({"fp16": {"enabled": True, "loss_scale": 512}})
    assert policy.loss_scale == LossScale(initial=512.0, dynamic=False)


def test_other_modes_do_not_scale():
    assert not policy_from_config({"bf16": {"enabled": True}, "fp16": FIELDS}).loss_scale.dynamic
