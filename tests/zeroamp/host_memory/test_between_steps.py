"""Optimizer state in host memory between the updates: the bits of a run without, and what is planned."""

from unittest import mock

import pytest
import torch

import zeroamp
from tests.measuring.state_bytes import bytes_of
from tests.processes.training import SmallTraining, config, same_bits
from tests.zeroamp.dry_run.plans import plan
from zeroamp.host_memory import between_steps

OFFLOAD = {"zeroamp": {"offload_between_steps": ["optimizer"]}}


PART_BYTES = 3_000  # of shards


def _adamw_and_sgd(parameters):
    first, others = parameters[:3], parameters[3:]
    return [torch.optim.AdamW(first, lr=1e-2), torch.optim.SGD(others, lr=1e-2, momentum=0.9)]


def _train(cfg, folder, seen):
    """Train with two optimizers, skipped steps in float16, and a save and a load in the middle.

    `seen`: bytes of AdamW's state on the device after each step, and before each of its updates.
    """
    training = SmallTraining(cfg, _adamw_and_sgd)
    model, (adamw, _), update = training.model, training.optimizer, torch.optim.AdamW.step

    def noted(optimizer, *arguments):
        seen["updates"].append(bytes_of(model, adamw, "optimizer"))
        return update(optimizer, *arguments)

    with mock.patch.object(torch.optim.AdamW, "step", noted):
        for index in range(4):
            training.step(index)
            if index == 1:
                zeroamp.save_checkpoint(folder, model, training.train)
            seen["steps"].append(bytes_of(model, adamw, "optimizer"))
    zeroamp.load_checkpoint(folder, model, training.train)
    seen["loaded"] = bytes_of(model, adamw, "optimizer")
    for index in range(2, 4):
        training.step(index)
    return training.parameters()


def _both(stage, more, folder):
    """Differing parameters, bytes between steps, and the largest part of the whole state that an update has had."""
    ours, theirs = {"steps": [], "updates": []}, {"steps": [], "updates": []}
    with mock.patch.object(between_steps, "PART_BYTES", PART_BYTES):
        parameters = _train(config(stage, **more, **OFFLOAD), folder / "with", ours)
    differing = same_bits(parameters, _train(config(stage, **more), folder / "without", theirs))
    assert ours["loaded"] <= 3 * 4, "more than the step counts, which the memory of the file holds"
    return differing, set(ours["steps"]), max(ours["updates"]) / max(theirs["steps"])


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, {}), (1, {"dtype": "float16", "fp16": {"initial_scale_power": 17, "hysteresis": 1}}), (3, {})],
)
def test_the_bits_are_those_without_and_no_state_stays_on_the_device(ranks2, tmp_path, stage, more):
    for differing, between, share in ranks2.run(_both, stage, more, tmp_path):
        assert (differing, between) == ([], {0})
        assert 0 < share < 0.7


@pytest.mark.slow
def test_the_plan_has_one_part_of_the_state_during_the_update_only(monkeypatch):
    without, whole = (plan(options, stages=[3]).stages[0].memory for options in ({}, OFFLOAD))
    monkeypatch.setattr(between_steps, "PART_BYTES", 1000)
    in_parts = plan(OFFLOAD, stages=[3]).stages[0].memory
    state = without.peak("init")["optimizer state"]
    for memory in (whole, in_parts):
        for phase in ("init", "forward", "backward"):
            assert memory.peak_bytes(phase) == without.peak_bytes(phase) - state
    assert whole.peak_bytes("optimizer") == without.peak_bytes("optimizer")
    assert 0 < in_parts.peak("optimizer")["optimizer state"] < state
    assert in_parts.peak("optimizer")["workspace"] < whole.peak("optimizer")["workspace"]


def test_a_config_that_offloads_twice_is_an_error():
    twice = {**OFFLOAD, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    with pytest.raises(zeroamp.ConfigError, match="Remove one of the two keys"):
        zeroamp.policy_from_config(twice)
