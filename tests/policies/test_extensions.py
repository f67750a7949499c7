"""Extensions: what a config key adds from a package outside of the core, loaded only if the key is on."""

import pytest
from torch import nn

import zeroamp
from zeroamp import policy_from_config
from zeroamp.policies.extensions import Extension, extensions_of

PLAIN = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
AUTOCAST = {"bf16": {}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
KEYS = {
    "zeroamp.reproducible": {"zeroamp": {"reproducible": True}},
    "zeroamp.param_gather_dtype": {"zeroamp": {"param_gather_dtype": "float8_e4m3fn"}},
    "zeroamp.overrides": {"zeroamp": {"overrides": [{"modules": "head", "communication": "fp32"}]}},
    "data_types.keep_in_fp32_modules": {"data_types": {"keep_in_fp32_modules": ["*norm*"]}},
    "torch_autocast.lower_precision_safe_modules=auto": {
        **AUTOCAST,
        "torch_autocast": {**AUTOCAST["torch_autocast"], "lower_precision_safe_modules": "auto"},
    },
}
"""Key -> a config in which it is on."""


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_on_has_its_extension(key):
    (extension,) = extensions_of(policy_from_config(PLAIN | KEYS[key]))
    assert isinstance(extension, Extension)
    assert zeroamp.EXTENSIONS[key] == f"{type(extension).__module__}:{type(extension).__name__}"


def test_keys_of_one_extension_make_it_once():
    config = PLAIN | KEYS["zeroamp.overrides"] | KEYS["data_types.keep_in_fp32_modules"]
    assert len(extensions_of(policy_from_config(config))) == 1


def test_an_attribute_of_a_module_has_its_extension_without_a_key():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0]._keep_in_fp32_modules = None
    assert extensions_of(policy_from_config(PLAIN), model) == ()
    model[0]._keep_in_fp32_modules = ["weight"]
    (extension,) = extensions_of(policy_from_config(PLAIN), model)
    assert type(extension).__module__ == "zeroamp.module_dtypes.extension"
