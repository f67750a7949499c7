"""From a config to a Policy, and to another one with some keys changed."""

import copy
import json
import pickle
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.small import Llama
from zeroamp import ConfigError, policy_from_config
from zeroamp.policies.derived import NO_OFFLOAD, Offload
from zeroamp.policies.json_values import flatten, nest
from zeroamp.policies.safe_modules import resolve_safe_classes
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import Honoured, iter_keys

AUTOCAST = {"enabled": True, "dtype": "bfloat16"}


def test_a_file_and_a_mapping_give_the_same_policy(tmp_path):
    cfg = {"torch_autocast": AUTOCAST, "zero_optimization": {"stage": 3}, "gradient_clipping": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cfg))
    assert policy_from_config(path) == policy_from_config(str(path)) == policy_from_config(cfg)


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


def test_offload_of_parameters_includes_that_of_the_optimizer():
    """Offload of parameters is that of all and offload of the optimizer alone is that of its state."""
    block = {"device": "cpu", "pin_memory": False}
    both = policy_from_config({"zero_optimization": {"stage": 2, "offload_param": block, "offload_optimizer": block}})
    assert both == policy_from_config({"zero_optimization": {"stage": 2, "offload_param": block}})
    assert (both.offload, both.offload_between_steps) == (Offload(to_cpu=True, pin_memory=False), ())
    state = policy_from_config({"zero_optimization": {"offload_optimizer": block}})
    assert state == policy_from_config({"zeroamp": {"offload_between_steps": ["optimizer"]}})
    assert (state.offload, state.replace(offload_optimizer=None)) == (NO_OFFLOAD, policy_from_config({}))
    assert policy_from_config({"zero_optimization": {"offload_param": {"device": "none"}}}).offload == NO_OFFLOAD


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
    assert policy.replace(**{"zero_optimization.offload_param.device": "cpu"}).offload == Offload(to_cpu=True)


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


SET = {"zero_optimization.stage": 3, "gradient_accumulation_steps": 2, "fp16.enabled": True}
OTHER_VALUES = {
    "torch_autocast.dtype": "bf16",
    "torch_autocast.lower_precision_safe_modules": "auto",
    "data_types.keep_in_fp32_modules": ["norm"],
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
    "optimizer.type": "sgd",
    "scheduler.type": "WarmupLR",
    "zero_optimization.stage": 1,
    "fp16.loss_scale": 8.0,
    "zeroamp.reduce_accumulate_dtype": "native",
    "zeroamp.external_autocast": "allow",
    "zeroamp.keep_inputs_in_fp32": ["t"],
    "zeroamp.overrides": [{"modules": ["head"], "communication": "fp32"}],
    "zeroamp.reduce": "sum",
    "zeroamp.offload_between_steps": ["optimizer"],
    "zeroamp.shard_dim": 0,
    "zeroamp.ranks_per_node": 4,
    "zeroamp.param_gather_dtype": "float8_e4m3fn",
    "zeroamp.partials_between_nodes": "bf16",
}
ENABLED_BY = {
    "torch_autocast": {"fp16.enabled": False, "torch_autocast.enabled": True, "torch_autocast.dtype": "half"},
    "zeroamp.seed": {"zeroamp.reproducible": True, "zero_optimization.stage": 2},
    "zeroamp.reproducible": {"zero_optimization.stage": 2},
    "zeroamp.param_gather_dtype": {"fp16.enabled": False, "bf16.enabled": True},
    "bf16": {"fp16.enabled": False, "bf16.enabled": True},
    "optimizer": {"optimizer.type": "Adam"},
    "scheduler": {"scheduler.type": "WarmupLR"},
    "zero_optimization.offload_param": {"zero_optimization.offload_param.device": "cpu"},
}
CHECKED_ONLY = {
    "data_types.param_dtype",
    "zero_optimization.offload_optimizer.pin_memory",
    "torch_autocast.enabled",
    "bf16.enabled",
    "fp16.enabled",
}


def _another(path, default):
    if path in OTHER_VALUES:
        return OTHER_VALUES[path]
    if path.endswith("params"):
        return {"lr": 0.5} if path.startswith("optimizer") else {"warmup_min_lr": 0.5}
    if "dtype" in path or path == "communication_data_type":
        return "bf16"
    if path.endswith("_states"):
        return True
    if isinstance(default, bool):
        return not default
    if isinstance(default, tuple):
        return ["Linear"]
    return "text" if isinstance(default, str) else 4 if default is None else default + 1


KEYS = [key for key in iter_keys(Config) if isinstance(key.key_class, Honoured) and key.path not in CHECKED_ONLY]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_every_honoured_key_is_in_the_policy_its_text_and_its_report(key):
    base = {**SET, **ENABLED_BY.get(key.path, ENABLED_BY.get(key.path.rpartition(".")[0], {}))}
    if key.path.endswith(("device", ".type", "enabled")):
        base.pop(key.path, None)
    changed = policy_from_config(nest({**base, key.path: _another(key.path, key.default)}))
    assert changed != policy_from_config(nest(base))
    assert policy_from_config(json.loads(str(changed))) == changed
    assert f"  {key.path}" in changed.report()
    held = flatten(changed.to_config())
    if key.path in held:
        assert changed.replace(**{key.path: held[key.path]}) == changed


def test_replace_derives_the_batch_sizes_again_that_were_derived():
    policy = policy_from_config({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, world_size=2)
    changed = policy.replace(gradient_accumulation_steps=5)
    assert (policy.train_batch_size, changed.train_batch_size) == (12, 20)
    assert "train_batch_size" not in dict(changed.given)
    policy = policy_from_config({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, world_size=2)
    changed = policy.replace(train_micro_batch_size_per_gpu=3)
    assert (policy.gradient_accumulation_steps, changed.gradient_accumulation_steps) == (3, 2)
    assert changed.replace(stage=2).replace(stage=0) == changed
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert policy_from_config(sizes).replace(gradient_accumulation_steps=1, train_batch_size=None).train_batch_size == 4
    removed = policy.replace(train_batch_size=None)
    assert (removed.train_batch_size, removed.gradient_accumulation_steps) == (4, 1)


def test_replace_takes_dtypes_and_says_which_blocks_have_enabled():
    policy = policy_from_config({"torch_autocast": AUTOCAST})
    assert policy.replace(torch_autocast__dtype=torch.float16).low_dtype == torch.float16
    with pytest.raises(ConfigError, match=r"^enabled is a key of several blocks: .*, bf16, .* Name the block: bf16="):
        policy.replace(enabled=True)


def test_a_policy_is_frozen():
    policy = policy_from_config({})
    for name in ("stage", "param_dtype", "stagee"):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(policy, name, 1)
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'stage'"):
        del policy.stage


def test_the_text_of_a_policy_is_its_config():
    """With its autos filled and its batch sizes derived."""
    cfg = {"zero_optimization": {"overlap_comm": True, "stage": "auto"}, "bf16": {}, "train_batch_size": 12}
    policy = policy_from_config(cfg, world_size=3, stage=2)
    assert json.loads(str(policy)) == {
        **cfg,
        "zero_optimization": {"overlap_comm": True, "stage": 2},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
    }
    assert policy_from_config(json.loads(str(policy))) == policy
    policy.to_config()["bf16"]["enabled"] = True
    assert policy.replace(bf16=True).mode == "bf16"
    assert (policy.mode, dict(policy.given)["bf16"]) == ("fp32", {})


def test_the_seed_of_a_reproducible_run_is_that_of_the_config():
    cfg = {"zero_optimization": {"stage": 2}, "zeroamp": {"reproducible": True, "seed": 3}}
    assert policy_from_config(cfg).seed == 3
