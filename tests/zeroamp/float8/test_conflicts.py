"""What `zeroamp.param_gather_dtype` is refused with, in a config."""

import pytest
import torch

from zeroamp import ConfigError, policy_from_config
from zeroamp.float8.conflicts import CONFLICTS, KEY

BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
SET = {
    "no low precision (mode fp32)": {"bf16": {"enabled": False}},
    "float16 compute": {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
    "zero_optimization.stage 0": {"zero_optimization": {"stage": 0}},
    "zero_optimization.zero_hpz_partition_size": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    "zero_optimization.offload_param": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
}


def _config(cfg):
    return {**BF16, **cfg, "zeroamp": {"param_gather_dtype": "float8_e4m3fn", **cfg.get("zeroamp", {})}}


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.name)
def test_a_conflict_is_refused_by_its_name(conflict):
    with pytest.raises(ConfigError) as caught:
        policy_from_config(_config(SET[conflict.name]))
    text = str(caught.value)
    assert text.startswith(f'{KEY} is "float8_e4m3fn", which is not supported with {conflict.name}: ')
    assert text.endswith(conflict.instead)
    without = {**BF16, **SET[conflict.name]}
    assert policy_from_config(without).param_gather_dtype is None


def test_the_key_takes_one_dtype():
    assert policy_from_config(_config({})).param_gather_dtype == torch.float8_e4m3fn
    assert policy_from_config(BF16).replace(param_gather_dtype="float8_e4m3fn") == policy_from_config(_config({}))
    for value in ("float8_e5m2", "fp8", "bf16", 8, True):
        with pytest.raises(ConfigError, match=KEY):
            policy_from_config({**BF16, "zeroamp": {"param_gather_dtype": value}})
