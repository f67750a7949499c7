"""The schema itself: classes of keys, DeepSpeed's defaults, and docs that are generated from it."""

import importlib.util

import pytest

from tests.processes.launch import ROOT
from zeroamp import ConfigError, policy_from_config
from zeroamp.policies.schema import SAME, Config, Honoured, Native, Unsupported, iter_keys
from zeroamp.reporting.key_report import report_rows

KEYS = {key.path: key for key in iter_keys(Config)}

# DeepSpeed 0.19.8's defaults, from its documentation and source, of every key that we honour. None: no default.
DEEPSPEED = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": 1.0,
    "torch_autocast.enabled": False,
    "torch_autocast.dtype": None,
    "torch_autocast.lower_precision_safe_modules": None,
    "bf16.enabled": False,
    "bf16.check_grad_overflow": True,
    "bf16.bf16_optimizer_states": False,
    "fp16.enabled": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
    "data_types.grad_accum_dtype": None,
    "data_types.param_dtype": None,
    "data_types.buffer_dtype": None,
    "data_types.keep_in_fp32_modules": "auto",
    "communication_data_type": None,
    "zero_optimization.stage": 0,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.pin_memory": True,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.pin_memory": True,
    "zero_optimization.leaf_module.classes": "sparse MoE blocks of transformers",
    "zero_optimization.leaf_module.names": (),
    "zero_optimization.leaf_module.name_suffixes": (),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "steps_per_print": 10,
}
OURS = {"data_types.optimizer_states_dtype"}  # and the block "zeroamp"


def test_our_defaults_are_deepspeeds_where_the_schema_does_not_say_otherwise():
    honoured = {path: key for path, key in KEYS.items() if isinstance(key.key_class, Honoured)}
    shared = {path for path in honoured if not path.startswith(("zeroamp.", "optimizer", "scheduler"))} - OURS
    assert shared == set(DEEPSPEED)
    for path in shared:
        stated = honoured[path].key_class.deepspeed_default
        assert DEEPSPEED[path] == (honoured[path].default if stated is SAME else stated), path


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if isinstance(key.key_class, Unsupported)])
def test_an_unsupported_key_is_refused_with_what_to_do_and_accepted_where_it_asks_for_nothing(path):
    key = KEYS[path]
    for value in (True, "auto_", 2, {"enabled": True}):
        if value not in key.key_class.off:
            with pytest.raises(ConfigError) as caught:
                policy_from_config(_nested(path, value))
            assert str(caught.value).startswith(f"{path} must be ")
    for value in key.key_class.off:
        if value is not None:
            cfg = _nested(path, value)
            assert _is_refused_for_its_type(cfg) or f"  {path} = " in policy_from_config(cfg).report()


def _is_refused_for_its_type(cfg):
    """`False` asks for nothing, and is still no value of a key that holds text."""
    try:
        policy_from_config(cfg)
    except ConfigError as error:
        return "Change the value" in str(error)
    return False


def _nested(path, value):
    *blocks, name = path.split(".")
    cfg = {name: value}
    for block in reversed(blocks):
        cfg = {block: cfg}
    return cfg


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if isinstance(key.key_class, Native)])
def test_a_native_key_is_accepted_and_reported(path):
    value = KEYS[path].default
    cfg = _nested(path, list(value) if isinstance(value, tuple) else value)
    required = {"optimizer": {"type": "SGD"}} if path.startswith("optimizer.") else {}
    policy = policy_from_config(
        {name: block | required.get(name, {}) if required else block for name, block in cfg.items()}
    )
    assert {row["status"] for row in report_rows(policy) if row["key"].startswith(path)} == {"native"}
    assert f"  {path} = " in policy.report().partition("Accepted, changes nothing: 1 key\n")[2]
    assert policy == policy_from_config(required)


def test_a_block_that_is_off_is_accepted_whatever_else_it_says():
    policy = policy_from_config({"autotuning": {"enabled": False, "fast": True}, "amp": {}})
    assert "autotuning.fast" in policy.report()


def _generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config.md", "accumulation.md", "deepspeed-api.md"])
def test_the_docs_are_what_the_code_generates(name):
    text = (ROOT / "docs" / name).read_text()
    assert "<!-- generated: " in text
    assert text == _generator().render(text), "run: python docs/generate.py"
    for path in KEYS if name == "config.md" else ():
        assert f"`{path}`" in text, path
