"""From a config to a Policy, and the words of each refusal."""

import json

import pytest
import torch
from pydantic import BaseModel
from torch import nn

from tests.launch import ROOT
from tests.models import Llama
from zeroamp import ConfigError, policy_from_config
from zeroamp.policies.safe_modules import resolve_safe_classes
from zeroamp.policies.schema import Config

AUTOCAST = {"enabled": True, "dtype": "bfloat16"}


def test_an_empty_config_is_fp32_at_stage_0_without_clipping():
    policy = policy_from_config({})
    assert (policy.mode, policy.low_dtype, policy.stage) == ("fp32", None, 0)
    assert (policy.gradient_clipping, policy.gradient_accumulation_steps) == (0.0, 1)


def test_a_file_and_a_mapping_give_the_same_policy(tmp_path):
    cfg = {"torch_autocast": AUTOCAST, "zero_optimization": {"stage": 3}, "gradient_clipping": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cfg))
    assert policy_from_config(path) == policy_from_config(str(path)) == policy_from_config(cfg)


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_dtype_spellings(name):
    assert policy_from_config({"torch_autocast": {"enabled": True, "dtype": name}}).low_dtype == torch.bfloat16


def test_a_disabled_block_is_validated_but_has_no_effect():
    assert policy_from_config({"torch_autocast": {"enabled": False, "dtype": "fp32"}}).mode == "fp32"


BAD = [
    ({"zero_optimisation": {}}, "zero_optimisation: found a key that zeroamp does not support", "'zero_optimization'"),
    ({"torch_autocast": {"enable": True}}, "torch_autocast.enable: found a key", "Did you mean 'enabled'?"),
    (
        {"optimizer": {}},
        "optimizer: found a key that zeroamp does not support",
        "refuses what it would otherwise ignore",
    ),
    ({"torch_autocast": {"enabled": "false"}}, "torch_autocast.enabled: found str 'false'", "valid boolean"),
    ({"torch_autocast": {"enabled": 1}}, "torch_autocast.enabled: found int 1", "valid boolean"),
    ({"torch_autocast": True}, "torch_autocast: found bool True", "valid dictionary"),
    ({"torch_autocast": {**AUTOCAST, "dtype": "int8"}}, "torch_autocast.dtype: found str 'int8'", "'bf16'"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype: found no dtype", '"bfloat16" or "float16"'),
    (
        {"torch_autocast": {**AUTOCAST, "dtype": "fp32"}},
        "torch_autocast.dtype: found 'fp32'",
        '"bfloat16" or "float16"',
    ),
    (
        {"torch_autocast": {**AUTOCAST, "lower_precision_safe_modules": "torch.nn.Linear"}},
        "torch_autocast.lower_precision_safe_modules: found str 'torch.nn.Linear'",
        "valid list",
    ),
    ({"torch_autocast": AUTOCAST, "bf16": {"enabled": True}}, "torch_autocast.enabled and bf16.enabled", "at most one"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled", "at most one"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: found int 4", "0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: found bool True", "0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": 2.0}}, "zero_optimization.stage: found float 2.0", "0, 1, 2 or 3"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: found int 0", "greater than or equal to 1"),
    ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps: found bool True", "valid integer"),
    ({"gradient_clipping": True}, "gradient_clipping: found bool True", "a boolean is not a number"),
    ({"gradient_clipping": float("inf")}, "gradient_clipping: found float inf", "finite"),
    ({"gradient_clipping": -1}, "gradient_clipping: found int -1", "greater than or equal to 0"),
    ({"communication_data_type": "int8"}, "communication_data_type: found str 'int8'", "'fp32'"),
    (
        {"communication_data_type": "bf16"},
        "communication_data_type: found bf16 at stage 0 with zeroamp.reduce_accumulate_dtype fp32",
        "a sum in fp32 needs fp32 on the wire",
    ),
    (
        {"torch_autocast": AUTOCAST, "communication_data_type": "fp16", "zero_optimization": {"stage": 2}},
        "communication_data_type: found fp16",
        "float16 gradients over- and underflow without loss scaling",
    ),
    (
        {"fp16": {"enabled": True}, "zeroamp": {"reduce_accumulate_dtype": "native"}},
        "zeroamp.reduce_accumulate_dtype: found native at stage 0 with fp16 on the wire",
        "An all-reduce of fp16 divides after it has summed, and overflows",
    ),
    (
        {"data_types": {"grad_accum_dtype": "fp16"}},
        "data_types.grad_accum_dtype: found fp16 with compute in fp32",
        "which only float16 compute has",
    ),
    (
        {"data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_dtype": "fp32"},
        "gradient_accumulation_dtype: found 'fp32' beside data_types.grad_accum_dtype 'bf16'",
        "Remove one of them",
    ),
    ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype: found str 'int8'", "'bf16'"),
    ({"fp16": {"enabled": True, "loss_scale": True}}, "fp16.loss_scale: found bool True", "a boolean is not a number"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 128}},
        "fp16.initial_scale_power: found int 128",
        "equal to 127",
    ),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}},
        "fp16.min_loss_scale: found 32, above the initial scale 2**4",
        "at most the initial scale",
    ),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis: found int 0", "greater than or equal to 1"),
    ("{}", "config: found a string of JSON", "Call json.loads"),
    ("no/such/file.json", "config: found no readable file at 'no/such/file.json'", "Check the path"),
    ([], "config: found list []", "a mapping, or the path of a JSON file"),
]


@pytest.mark.parametrize(("cfg", "where_and_found", "words"), BAD, ids=[str(row[0])[:60] for row in BAD])
def test_bad_input_is_refused_by_name(cfg, where_and_found, words):
    with pytest.raises(ConfigError) as caught:
        policy_from_config(cfg)
    assert where_and_found in str(caught.value)
    assert words in str(caught.value)


def test_a_key_twice_in_a_file_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"gradient_clipping": 1.0, "gradient_clipping": 2.0}')
    with pytest.raises(ConfigError, match="gradient_clipping: found the key twice"):
        policy_from_config(path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b""])
def test_a_file_that_is_no_json_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="valid: a JSON object. Mend the file"):
        policy_from_config(path)


def test_safe_classes_by_full_name_by_bare_name_and_from_the_model():
    classes = resolve_safe_classes(["torch.nn.Linear", "Conv2d", "Block"], Llama(tied=True))
    assert classes[:2] == (nn.Linear, nn.Conv2d)
    assert classes[2].__name__ == "Block"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch.nn.Linaer", "Looked for 'Linaer' in 'torch.nn'"),
        ("no_such_package.Linear", "which does not import"),
        ("Linaer", "which no class of torch.nn or of the model carries"),
        ("torch.nn.functional.linear", "valid: subclasses of torch.nn.Module"),
        ("collections.OrderedDict", "valid: subclasses of torch.nn.Module"),
    ],
)
def test_a_class_name_that_is_none_says_what_was_looked_up(name, words):
    with pytest.raises(ConfigError, match="torch_autocast.lower_precision_safe_modules: found") as caught:
        resolve_safe_classes([name], nn.Linear(1, 1))
    assert words in str(caught.value)


def _keys(model, prefix=""):
    for name, field in model.model_fields.items():
        is_block = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        yield from _keys(field.annotation, f"{name}.") if is_block else [(prefix, name)]


def test_every_key_is_in_the_docs():
    documented = (ROOT / "docs" / "config.md").read_text()
    for prefix, name in _keys(Config):
        assert f"`{prefix}{name}`" in documented or f"`.{name}`" in documented, prefix + name
