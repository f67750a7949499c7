"""From a config to a Policy, and to another one with some keys changed."""

import copy
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.small import Llama
from zeroamp import ConfigError, policy_from_config
from zeroamp.policies.policy import Offload
from zeroamp.policies.safe_modules import resolve_safe_classes

AUTOCAST = {"enabled": True, "dtype": "bfloat16"}


def test_a_file_and_a_mapping_give_the_same_policy(tmp_path):
    cfg = {"torch_autocast": AUTOCAST, "zero_optimization": {"stage": 3}, "gradient_clipping": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cfg))
    assert policy_from_config(path) == policy_from_config(str(path)) == policy_from_config(cfg)


def test_a_check_of_a_mode_that_is_off_has_no_effect():
    policy = policy_from_config({"torch_autocast": AUTOCAST, "bf16": {"enabled": False, "check_grad_overflow": True}})
    assert not policy.check_grad_overflow
    assert "bf16 is not enabled" in policy.report()


def test_16_bit_weights_on_save_are_the_low_dtype_of_the_mode():
    zero = {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True}
    policy = policy_from_config({"torch_autocast": AUTOCAST, "zero_optimization": zero})
    assert policy.export_dtype == torch.bfloat16
    assert policy_from_config(policy.to_config()) == policy
    assert "stage3_gather_16bit_weights_on_model_save" in policy.report()
    changed = policy.replace(stage3_gather_16bit_weights_on_model_save=False)
    assert changed.export_dtype == torch.float32
    with pytest.raises(ConfigError, match="stage3_gather_16bit_weights_on_model_save .* is true. Enable one"):
        policy_from_config({"zero_optimization": zero})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((content, "bad.json.* must contain a JSON object") for content in (b"{", b"\xff\xfe", b"", b"[]")),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "must contain a JSON object"),
        (b'{"gradient_clipping": 1.0, "gradient_clipping": 2.0}', "gradient_clipping occurs twice"),
    ],
    ids=["half", "no UTF-8", "empty", "a list", "nesting without end", "a key twice"],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, content, words):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{words}.* Correct the file"):
        policy_from_config(path)


def test_safe_classes_by_full_name_by_bare_name_and_from_the_model():
    classes = resolve_safe_classes(["torch.nn.Linear", "Conv2d", "Block"], Llama(tied=True))
    assert classes[:2] == (nn.Linear, nn.Conv2d)
    assert classes[2].__name__ == "Block"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch.nn.Linaer", "'torch.nn' has no importable 'Linaer'"),
        ("no_such_package.Linear", "Check the spelling and that the package is installed"),
        ("Linaer", 'Write the full name "package.module.Class"'),
        ("torch.nn.functional.linear", "Name a module class"),
        ("collections.OrderedDict", "Name a module class"),
    ],
)
def test_a_class_name_that_is_none_says_what_was_looked_up(name, words):
    with pytest.raises(ConfigError, match=f"torch_autocast.lower_precision_safe_modules names '{name}'") as caught:
        resolve_safe_classes([name], nn.Linear(1, 1))
    assert words in str(caught.value)


def test_what_is_read_is_the_policys_own():
    names = ["Linear"]
    cfg = {"torch_autocast": {**AUTOCAST, "lower_precision_safe_modules": names}}
    policy = policy_from_config(cfg)
    cfg["torch_autocast"]["dtype"] = "float16"
    names.append("Other")
    assert "Other" not in policy.report()
    assert policy.low_dtype == torch.bfloat16
    assert dict(policy.given)["torch_autocast.dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.float32(1), "a float32"),
        (torch.tensor(1.0), "a Tensor"),
        (b"1", "a bytes"),
        ({1.0}, "a set"),
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
        assert str(caught.value).startswith(f"{where} must be ")
        assert f"is {found}. Write a plain Python value" in str(caught.value)


def test_an_error_lists_the_first_twenty_keys_and_counts_the_others():
    cfg = {f"key_{number}": 1 for number in range(5000)}
    with pytest.raises(ConfigError) as caught:
        policy_from_config(cfg | {"torch_autocast": {"lower_precision_safe_modules": [1] * 50}})
    *lines, last = str(caught.value).splitlines()
    assert len(lines) == 20
    assert last == "5,030 more keys have errors."


@pytest.mark.parametrize(
    ("cfg", "changes", "key", "value"),
    [
        ({"bf16": {"enabled": True}}, {"stage": 7}, "zero_optimization.stage", "is 7"),
        ({"bf16": {"enabled": True}}, {"fp16": True}, "bf16.enabled and fp16.enabled", "are true"),
        ({}, {"stagee": 2}, "stagee is not a key of the config. Did you mean 'stage'?", ""),
        ({}, {"device": "cpu"}, "device is the name of several keys", "offload_param.device"),
        ({}, {"gradient_clipping": torch.ones(1)}, "gradient_clipping", "is a Tensor"),
        ({}, {"mode": "fp16"}, "mode is not a key", ""),  # not comet.mode, which changes nothing
        ({"train_batch_size": 12}, {"gradient_accumulation_steps": 5}, "train_batch_size", "is 12"),
    ],
    ids=str,
)
def test_a_change_that_makes_no_valid_config_names_the_key(monkeypatch, cfg, changes, key, value):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError) as caught:
        policy_from_config(cfg).replace(**changes)
    assert str(caught.value).startswith(key)
    assert value in str(caught.value)


def test_a_changed_policy_is_that_of_the_changed_config():
    cfg = {"torch_autocast": AUTOCAST, "zero_optimization": {"stage": 3, "overlap_comm": True}, "train_batch_size": 12}
    policy = policy_from_config(cfg, world_size=3)
    assert policy.replace() == policy
    changed = policy.replace(stage=2, gradient_clipping=0.5, bf16=True, torch_autocast__enabled=False)
    assert (changed.mode, changed.stage, changed.gradient_clipping) == ("bf16", 2, 0.5)
    written = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    assert changed == policy_from_config({**written, "train_batch_size": 12}, world_size=3)
    assert dict(changed.given)["zero_optimization.stage"] == 2
    assert dict(changed.given)["zero_optimization.overlap_comm"] is True


def test_a_block_can_be_changed_and_taken_out():
    policy = policy_from_config({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    assert policy.replace(optimizer={"type": "SGD"}).optimizer.type == "SGD"
    assert policy.replace(optimizer=None) == policy_from_config({})
    for change in ({"zero_optimization.offload_optimizer.device": "cpu"}, {"offload_optimizer": {"device": "cpu"}}):
        assert policy.replace(**change).offload == Offload(to_cpu=True)
    offloaded = policy_from_config({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert offloaded.replace(offload_param=None) == policy_from_config({"zero_optimization": {"stage": 3}})


def test_equal_policies_hash_alike_and_survive_a_pickle_and_a_copy():
    cfg = {"fp16": {"enabled": True}, "optimizer": {"type": "adam"}, "zero_optimization": {"overlap_comm": True}}
    policy, other = policy_from_config(cfg), policy_from_config({**cfg, "zero_optimization": {}})
    assert policy == other != policy_from_config({})
    assert hash(policy) == hash(other)
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)).given == policy.given
    assert eval(repr(policy)) == policy
    if sys.version_info >= (3, 13):
        assert copy.replace(policy, stage=2).stage == 2


def test_a_report_lists_the_keys_of_the_config_and_the_defaults_if_asked():
    policy = policy_from_config({"bf16": {"enabled": True}})
    lines = policy.report().splitlines()
    assert lines[:2] == ["Honoured: 1 key", "  bf16.enabled = true"]
    assert lines[-1].endswith("keys not in the config have their default.")
    assert "  zero_optimization.stage = 0" in policy.report(defaults=True).splitlines()
    assert "zero_optimization.stage" not in policy.report()


def test_replace_derives_the_batch_sizes_again_that_were_derived():
    policy = policy_from_config({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, world_size=2)
    changed = policy.replace(gradient_accumulation_steps=5)
    assert (policy.train_batch_size, changed.train_batch_size) == (12, 20)
    assert "train_batch_size" not in dict(changed.given)
    policy = policy_from_config({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, world_size=2)
    changed = policy.replace(train_micro_batch_size_per_gpu=3)
    assert (policy.gradient_accumulation_steps, changed.gradient_accumulation_steps) == (3, 2)
    assert changed.replace(stage=2).replace(stage=0) == changed
    removed = policy.replace(train_batch_size=None)
    assert (removed.train_batch_size, removed.gradient_accumulation_steps) == (4, 1)


def test_replace_takes_dtypes_and_says_which_blocks_have_enabled():
    policy = policy_from_config({"torch_autocast": AUTOCAST})
    assert policy.replace(torch_autocast__dtype=torch.float16).low_dtype == torch.float16
    with pytest.raises(ConfigError, match=r"^enabled is a key of several blocks: .*, bf16, .* Name the block: bf16="):
        policy.replace(enabled=True)


def test_a_policy_is_frozen_and_says_what_to_call():
    policy = policy_from_config({})
    with pytest.raises(ConfigError, match=r"^policy\.stage was set, .* frozen. Call policy.replace\(stage="):
        policy.stage = 1
    with pytest.raises(ConfigError, match="^policy.stage"):
        del policy.stage
