"""Extensions: what a config key adds from a package outside of the core, loaded only if the key is on."""

import inspect
import subprocess
import sys

import pytest
from torch import nn

import zeroamp
from tests.measuring.sources import ROOT
from zeroamp import policy_from_config
from zeroamp.policies.extensions import Extension, extensions_of, load

PLAIN = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
KEYS = {
    "zeroamp.reproducible": ({"zeroamp": {"reproducible": True}}, "zeroamp.reproducible.extension"),
    "zeroamp.param_gather_dtype": ({"zeroamp": {"param_gather_dtype": "float8_e4m3fn"}}, "zeroamp.float8.extension"),
    "zeroamp.overrides": (
        {"zeroamp": {"overrides": [{"modules": "head", "communication": "fp32"}]}},
        "zeroamp.module_dtypes.extension",
    ),
    "data_types.keep_in_fp32_modules": (
        {"data_types": {"keep_in_fp32_modules": ["*norm*"]}},
        "zeroamp.module_dtypes.extension",
    ),
    "torch_autocast.lower_precision_safe_modules=auto": (
        {"bf16": {}, "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": "auto"}},
        "zeroamp.discovery.extension",
    ),
}

CHECK = """
import sys
from zeroamp import policy_from_config

outside = ("module_dtypes", "discovery", "reproducible", "float8", "optimizers", "reporting")
policy_from_config({config!r})
print([name for name in outside if f"zeroamp.{{name}}" in sys.modules])
"""


def test_a_config_without_such_keys_has_none():
    for config in (
        PLAIN,
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["Linear"]}},
    ):
        assert extensions_of(policy_from_config(config), nn.Linear(2, 2)) == ()


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_on_has_its_extension(key):
    config, module = KEYS[key]
    (extension,) = extensions_of(policy_from_config(PLAIN | config))
    assert isinstance(extension, Extension)
    assert type(extension).__module__ == module
    assert zeroamp.EXTENSIONS[key] == f"{module}:{type(extension).__name__}"


def test_keys_of_one_extension_make_it_once():
    config = PLAIN | KEYS["zeroamp.overrides"][0] | KEYS["data_types.keep_in_fp32_modules"][0]
    assert len(extensions_of(policy_from_config(config))) == 1


@pytest.mark.parametrize("name", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
def test_an_attribute_of_a_module_has_its_extension_without_a_key(name):
    model = nn.Sequential(nn.Linear(2, 2))
    setattr(model[0], name, None)
    assert extensions_of(policy_from_config(PLAIN), model) == ()
    setattr(model[0], name, ["weight"])
    (extension,) = extensions_of(policy_from_config(PLAIN), model)
    assert type(extension).__module__ == "zeroamp.module_dtypes.extension"


def test_all_names_of_the_table_can_be_loaded():
    assert all(callable(load(key)) for key in zeroamp.EXTENSIONS if not key.endswith(".types"))
    assert {*load("optimizer.types").blocks} > {"AdamW"}
    assert {*load("scheduler.types").blocks} > {"WarmupLR"}


def test_extensions_have_the_methods_of_the_base_class_only():
    """A misspelt method would never be called."""
    methods = {name for name, _ in inspect.getmembers(Extension, inspect.isfunction)}
    for key in KEYS:
        own = {name for name, value in vars(load(key)).items() if inspect.isfunction(value)}
        assert own - {"__init__"} <= methods


@pytest.mark.parametrize(
    ("added", "packages"),
    [
        ({}, []),
        (KEYS["zeroamp.reproducible"][0], ["reproducible", "optimizers"]),
        (KEYS["zeroamp.overrides"][0], ["module_dtypes"]),
        (KEYS["torch_autocast.lower_precision_safe_modules=auto"][0], ["discovery"]),
        ({"optimizer": {"type": "AdamW"}}, ["optimizers"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["optimizers"]),
    ],
)
def test_a_package_is_imported_only_if_its_key_is_on(added, packages):
    command = [sys.executable, "-c", CHECK.format(config=PLAIN | added)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert result.stdout.strip() == str(packages)
