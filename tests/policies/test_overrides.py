"""`zeroamp.overrides` as values: what is read, and what contradicts itself or the mode."""

import json

import pytest
import torch

from zeroamp import ConfigError, policy_from_config

MODES = {
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
}


def policy_of(*overrides, mode="autocast", stage=3, **block):
    zero = {"stage": stage}
    return policy_from_config({**MODES[mode], "zero_optimization": zero, "zeroamp": {"overrides": overrides, **block}})


def test_one_pattern_and_a_list_of_one_are_the_same_policy():
    one = policy_of({"modules": "head", "compute": "float", "communication": "bfloat16"})
    assert one == policy_of({"modules": ["head"], "compute": torch.float32, "communication": "bf16"})
    assert one != policy_of({"modules": ["head"], "compute": torch.float32})
    assert policy_from_config(json.loads(str(one))) == one
    assert hash(one) == hash(policy_from_config(one.to_config()))
    assert one.replace(overrides=[]).overrides == ()
    assert one.overrides[0].settings() == "compute fp32, communication bf16"
    assert '"modules": "head"' in one.report()


@pytest.mark.parametrize(
    ("override", "options", "words"),
    [
        ({"modules": []}, {}, r"zeroamp.overrides.0.modules must name modules, but is \[\]"),
        ({"modules": "head"}, {}, "zeroamp.overrides.0 sets no dtype. Add compute, param or communication"),
        ({"compute": "fp32"}, {}, "zeroamp.overrides.0.modules is missing"),
        ({"modules": "head", "compte": "fp32"}, {}, "zeroamp.overrides.0.compte is a key of neither .*mean 'compute'"),
        ({"modules": 3, "compute": "fp32"}, {}, "0.modules must be a pattern or a list of patterns, but is 3. Ch"),
        ({"modules": "head", "param": "bf16"}, {"mode": "fp16"}, '0.param must be "fp32" or "fp16" in mode fp16'),
        ({"modules": "head", "compute": "bf16"}, {"mode": "fp32"}, "enable torch_autocast or a bf16 block"),
        ({"modules": "head", "compute": "fp32", "param": "bf16"}, {}, '0.param must be "fp32", as compute is'),
        ({"modules": "head", "communication": "fp16"}, {}, '0.communication must be "fp32" or "bf16" unless something'),
        ({"modules": "head", "communication": "bf16"}, {"stage": 0}, '0.communication must be "fp32" at stage 0'),
        ("head", {}, "zeroamp.overrides.0 must be an object of keys"),
    ],
)
def test_what_contradicts_itself_or_the_mode_is_refused_by_name(override, options, words):
    with pytest.raises(ConfigError, match=words):
        policy_of(override, **options)
