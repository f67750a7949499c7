"""From a config to a Policy, and the words of each refusal."""

import dataclasses
import json
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.small import Llama
from zeroamp import ConfigError, policy_from_config
from zeroamp.policies.config import refuse_inconsistent
from zeroamp.policies.policy import NO_OFFLOAD, Offload
from zeroamp.policies.safe_modules import resolve_safe_classes

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


def test_a_check_of_a_mode_that_is_off_has_no_effect():
    policy = policy_from_config({"torch_autocast": AUTOCAST, "bf16": {"enabled": False, "check_grad_overflow": True}})
    assert not policy.check_grad_overflow
    assert "bf16 is not enabled" in policy.report()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16_bit_weights_on_save_are_the_low_dtype_of_the_mode(stage):
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    policy = policy_from_config({"torch_autocast": AUTOCAST, "zero_optimization": zero})
    assert policy.export_dtype == torch.bfloat16
    assert policy_from_config(policy.to_config()) == policy
    assert "stage3_gather_16bit_weights_on_model_save" in policy.report().partition("default")[0]
    assert dataclasses.replace(policy, gather_16bit_weights_on_save=False).export_dtype == torch.float32
    assert policy_from_config({"fp16": {"enabled": True}}).export_dtype == torch.float32


def test_16_bit_weights_on_save_need_a_16_bit_precision():
    with pytest.raises(ConfigError, match="stage3_gather_16bit_weights_on_model_save: found true without a 16-bit"):
        policy_from_config({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}})


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


def test_a_dtype_that_may_be_an_alias_is_checked_against_the_enabled_block():
    assert policy_from_config({"bf16": {"enabled": True}, "data_types": {"param_dtype": "bfloat16"}}).mode == "bf16"
    with pytest.raises(ConfigError, match="data_types.param_dtype: found 'fp16' with bf16 precision"):
        policy_from_config({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}})


def test_what_is_read_is_the_policys_own():
    cfg = {"torch_autocast": dict(AUTOCAST)}
    policy = policy_from_config(cfg)
    cfg["torch_autocast"]["dtype"] = "float16"
    assert policy.low_dtype == torch.bfloat16
    assert dict(policy.given)["torch_autocast.dtype"] == "bfloat16"


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="valid: a JSON object"):
        policy_from_config(path)


def test_offload_needs_one_value_of_pin_memory_and_one_key_at_stages_1_and_2():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    assert policy_from_config({"zero_optimization": zero}).offload == Offload(to_cpu=True, pin_memory=False)
    assert policy_from_config({"zero_optimization": {"offload_param": {"device": "none"}}}).offload == NO_OFFLOAD


def test_counting_can_be_asked_for_in_deepspeeds_words():
    assert policy_from_config({}).count_traffic
    assert not policy_from_config({"comms_logger": {"enabled": False}}).count_traffic
    assert policy_from_config({"comms_logger": {"enabled": True}}).count_traffic


NESTED = {}
NESTED["gradient_clipping"] = NESTED


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.float32(1), "a float32"),
        (np.bool_(True), "a bool"),
        (np.ones(2), "a ndarray"),
        (torch.tensor(1.0), "a Tensor"),
        (Decimal(3), "a Decimal"),
        (2**63, "an integer of more than 64 bits"),
        (10**5000, "an integer of more than 64 bits"),
        (b"1", "a bytes"),
        ({1.0}, "a set"),
        ("\ud800", "a text that is no Unicode"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_does_not_have_are_refused_wherever_they_are(value, found):
    for where, cfg, arguments in (
        ("gradient_clipping", {"gradient_clipping": value}, {}),
        ("flops_profiler.recompute_fwd_factor", {"flops_profiler": {"recompute_fwd_factor": value}}, {}),
        ("amp.opt_level.0", {"amp": {"enabled": False, "opt_level": [value]}}, {}),
        ("the argument gradient_clipping", {"gradient_clipping": "auto"}, {"gradient_clipping": value}),
    ):
        with pytest.raises(ConfigError) as caught:
            policy_from_config(cfg, **arguments)
        assert str(caught.value).startswith(f"{where}: found {found}; valid: what JSON has"), caught.value


def test_a_numpy_float64_is_a_float():
    policy = policy_from_config({"gradient_clipping": np.float64(0.5)})
    assert type(policy.gradient_clipping) is float


def test_nesting_without_end_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="blocks in blocks without end"):
        policy_from_config(NESTED)
    path = tmp_path / "deep.json"
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ConfigError, match="valid: a JSON object"):
        policy_from_config(path)


def test_lists_are_copied_too():
    names = ["Linear"]
    policy = policy_from_config({"torch_autocast": {**AUTOCAST, "lower_precision_safe_modules": names}})
    names.append("Other")
    assert "Other" not in policy.report()


@pytest.mark.parametrize(
    ("cfg", "changes", "words"),
    [
        ({"bf16": {"enabled": True}}, {"stage": 7}, "zero_optimization.stage: found int 7"),
        ({"bf16": {"enabled": True}}, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: found int 0"),
        (
            {"bf16": {"enabled": True}},
            {"communication_data_type": torch.float16},
            "communication_data_type: found fp16",
        ),
        ({"bf16": {"enabled": True}}, {"grad_accum_dtype": torch.float16}, "data_types.grad_accum_dtype: found fp16"),
        (
            {"bf16": {"enabled": True}},
            {"low_dtype": torch.float16},
            "Policy.low_dtype: found torch.float16; valid: torch.bf",
        ),
        (
            {},
            {"check_grad_overflow": True},
            "Policy.check_grad_overflow: found True; valid: False, as the other fields",
        ),
    ],
)
def test_a_policy_changed_by_hand_is_checked(cfg, changes, words):
    with pytest.raises(ConfigError) as caught:
        refuse_inconsistent(dataclasses.replace(policy_from_config(cfg), **changes))
    assert str(caught.value).startswith(words)


def test_a_policy_changed_by_hand_is_fine_where_its_fields_agree():
    policy = policy_from_config({"torch_autocast": AUTOCAST, "train_batch_size": 12}, world_size=3)
    for changes in ({"stage": 2}, {"mode": "bf16"}, {"gradient_clipping": 2.0}, {"offload": Offload(pin_memory=False)}):
        refuse_inconsistent(dataclasses.replace(policy, **changes))
