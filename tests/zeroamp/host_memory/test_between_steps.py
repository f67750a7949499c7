"""Optimizer state in host memory between the updates: the bits of a run without, and what is planned."""

import pytest
import torch

import zeroamp
from tests.measuring.state_bytes import bytes_of
from tests.processes.training import SmallTraining, config, same_bits
from tests.zeroamp.dry_run.plans import plan

OFFLOAD = {"zeroamp": {"offload_between_steps": ["optimizer"]}}


def _adamw_and_sgd(parameters):
    return [torch.optim.AdamW(parameters[:3], lr=1e-2), torch.optim.SGD(parameters[3:], lr=1e-2, momentum=0.9)]


def _train(cfg, folder, seen):
    """Train with two optimizers, skipped steps in float16, and a save and a load in the middle."""
    training = SmallTraining(cfg, _adamw_and_sgd)
    for index in range(6):
        training.step(index)
        seen.append(bytes_of(training.model, training.optimizer[0], "optimizer"))
        if index == 3:
            zeroamp.save_checkpoint(folder, training.model, training.train)
    zeroamp.load_checkpoint(folder, training.model, training.train)
    for index in (4, 5):
        training.step(index)
    return training.parameters()


def _both(stage, more, folder):
    bytes_with, bytes_without = [], []
    ours = _train(config(stage, **more, **OFFLOAD), folder / "with", bytes_with)
    theirs = _train(config(stage, **more), folder / "without", bytes_without)
    return same_bits(ours, theirs), set(bytes_with), bytes_without[-1] > 0


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, {}), (2, {"dtype": "float16", "fp16": {"initial_scale_power": 20, "hysteresis": 1}}), (3, {})],
)
def test_the_bits_are_those_without_and_no_state_stays_on_the_device(ranks2, tmp_path, stage, more):
    assert ranks2.run(_both, stage, more, tmp_path) == [([], {0}, True)] * 2


def test_the_plan_has_the_state_during_the_update_only():
    with_key, without = (plan(options, stages=[3]).stages[0].memory for options in (OFFLOAD, {}))
    state = without.peak("init")["optimizer state"]
    for phase in ("init", "forward", "backward"):
        assert with_key.peak_bytes(phase) == without.peak_bytes(phase) - state
    assert with_key.peak_bytes("optimizer") == without.peak_bytes("optimizer")


def test_a_config_that_offloads_twice_is_an_error():
    twice = {**OFFLOAD, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(zeroamp.ConfigError, match="Remove one of the two keys"):
        zeroamp.policy_from_config(twice)
