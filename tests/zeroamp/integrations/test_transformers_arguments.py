"""A Trainer's arguments beside the config: what fills it, what must agree, what is refused."""

import json

import pytest
import torch
from torch import nn

import zeroamp
from tests.processes.trainer import arguments, fresh, llama, trainer_of

pytest.importorskip("transformers", reason="the arguments are transformers'")
pytest.importorskip("accelerate", reason="transformers' arguments need it")


@pytest.fixture(autouse=True)
def _fresh():
    import warnings

    with warnings.catch_warnings():
        fresh()
        yield
        fresh()


def _filled(cfg, model=None, steps=None, folder="unused", **changes):
    from zeroamp.integrations.transformers import fill_auto

    return fill_auto(cfg, arguments(0, folder, **changes), model, steps)


AUTO = {
    "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                          "stage3_param_persistence_threshold": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                  "warmup_num_steps": "auto", "total_num_steps": "auto"}},
}  # fmt: skip


def test_all_values_are_those_of_transformers_for_deepspeed(tmp_path):
    """Sizes by transformers' formulas: h * h, int(0.9 * h * h) and 10 * h, with h = 32."""
    changes = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.7, "warmup_steps": 5, "weight_decay": 0.1}
    found = _filled(AUTO, llama(), 50, **changes)
    assert found["zero_optimization"] == {
        "stage": 3, "reduce_bucket_size": 1024, "stage3_prefetch_bucket_size": 921,
        "stage3_param_persistence_threshold": 320,
    }  # fmt: skip
    assert (found["train_micro_batch_size_per_gpu"], found["train_batch_size"]) == (2, 6)
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (3, 0.7)
    assert found["optimizer"]["params"] == {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    scheduler = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 5, "total_num_steps": 50}
    assert found["scheduler"]["params"] == scheduler
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (True, False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(AUTO))
    assert _filled(path, llama(), 50, **changes) == found
    zeroamp.policy_from_config(found)


def test_without_model_and_steps_their_keys_stay_open():
    found = _filled(AUTO)
    assert found["zero_optimization"]["reduce_bucket_size"] == "auto"
    assert found["scheduler"]["params"]["total_num_steps"] == "auto"
    assert found["optimizer"]["params"]["lr"] == 1e-2


def test_every_mismatch_is_named_at_once():
    cfg = {"gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "eps": 1e-8}},
           "train_batch_size": 7, "fp16": {"enabled": True}}  # fmt: skip
    with pytest.raises(zeroamp.ConfigError) as raised:
        _filled(cfg, max_grad_norm=1.0)
    text = str(raised.value)
    for line in (
        "gradient_clipping is 0.5, but max_grad_norm is 1.0",
        "optimizer.params.lr is 1.0, but learning_rate is 0.01",
        "train_batch_size is 7, but the train batch size of all ranks is 2",
        "fp16.enabled is true, but the argument fp16 is false",
    ):
        assert line in text
    assert "eps" not in text
    assert 'write "auto"' in text


AUTO_AUTOCAST = {"torch_autocast": {"enabled": "auto", "dtype": "auto"}}
SAVES_16_BIT = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
"""As in transformers' template of a ZeRO-3 config."""
AUTO_BLOCKS = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("cfg", "precision", "expected"),
    [
        ({}, "bf16", ("autocast", torch.bfloat16)),
        ({}, "fp16", ("autocast", torch.float16)),
        ({}, "no", ("fp32", None)),
        (AUTO_AUTOCAST, "bf16", ("autocast", torch.bfloat16)),
        (AUTO_AUTOCAST, "no", ("fp32", None)),
        (AUTO_BLOCKS | SAVES_16_BIT, "no", ("fp32", None)),  # the key has no effect in fp32
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "no", ("autocast", torch.bfloat16)),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": "auto"}}, "bf16", ("autocast", torch.bfloat16)),
        (AUTO_BLOCKS, "fp16", ("fp16", torch.float16)),
        ({"fp16": {"enabled": False}}, "bf16", ("autocast", torch.bfloat16)),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "bf16", "torch_autocast.dtype is .*float16"),
        ({"torch_autocast": {"enabled": False}}, "bf16", "torch_autocast.enabled is false, but .* bf16 is true"),
        ({"bf16": {"enabled": True}}, "no", "bf16.enabled is true, but the argument bf16 is false"),
        ({"bf16": {"enabled": False}}, "bf16", "bf16.enabled is false, but the argument bf16 is true"),
    ],
)
def test_the_precision_of_a_config_and_the_arguments_or_how_they_disagree(cfg, precision, expected):
    arguments_say = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    if isinstance(expected, str):
        with pytest.raises(zeroamp.ConfigError, match=expected):
            _filled(cfg, **arguments_say)
        return
    policy = zeroamp.policy_from_config(_filled(cfg, **arguments_say))
    assert (policy.mode, policy.low_dtype) == expected


def test_an_auto_that_nothing_fills_is_an_error():
    for key in ("stage3_max_live_parameters", "reduce_bucket_size"):
        with pytest.raises(zeroamp.ConfigError, match=f"zero_optimization.{key} must have a value.*hidden_size"):
            _filled({"zero_optimization": {"stage": 3, key: "auto"}}, nn.Linear(2, 2))


def test_a_trainer_needs_one_config(tmp_path):
    from transformers import TrainingArguments

    from zeroamp.integrations.transformers import ZeroampTrainer

    plain = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(zeroamp.ConfigError, match="has no zeroamp config"):
        ZeroampTrainer(llama(), plain)
    with pytest.raises(zeroamp.ConfigError, match="given twice"):
        ZeroampTrainer(llama(), arguments(0, tmp_path), zeroamp={})


REFUSED_ARGUMENTS = {
    "fsdp": "zero_optimization.stage",
    "deepspeed": "pass the file as zeroamp",
    "parallelism_config": "docs/meshes.md",
    "auto_find_batch_size": "out-of-memory",
    "bf16_full_eval": "master weights",
    "fp16_full_eval": "master weights",
    "save_on_each_node": "shared file system",
    "enable_jit_checkpoint": "docs/transformers.md",
}
"""Argument of a Trainer -> words of its refusal."""


def test_an_old_transformers_is_named(monkeypatch):
    from zeroamp.integrations.transformers import ZeroampTrainer

    monkeypatch.setattr("transformers.Trainer.create_optimizer", lambda self: None)
    monkeypatch.setattr("transformers.__version__", "5.2.0")
    with pytest.raises(
        ImportError, match=r"^ZeroampTrainer needs transformers 5\.3 or newer, but 5\.2\.0 is installed"
    ):
        ZeroampTrainer(zeroamp={})


def test_arguments_that_a_wrapped_model_cannot_honour(tmp_path):
    args = arguments(3, tmp_path)
    for name in REFUSED_ARGUMENTS:
        object.__setattr__(args, name, "something")
    with pytest.raises(zeroamp.ConfigError) as raised:
        trainer_of(3, tmp_path, args=args)
    lines = dict(line[2:].split(": ", 1) for line in str(raised.value).splitlines() if line.startswith("- "))
    assert lines.keys() == REFUSED_ARGUMENTS.keys()
    assert [name for name, says in REFUSED_ARGUMENTS.items() if says not in lines[name]] == []


def test_a_spread_model_and_sums_of_gradients_are_refused(tmp_path):
    """A model that is spread over devices and a sum of gradients are refused."""
    model = llama()
    model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(zeroamp.WrapError, match="device_map"):
        trainer_of(3, tmp_path, model=model)
    with pytest.raises(zeroamp.ConfigError, match='zeroamp.reduce is "sum"'):
        trainer_of(3, tmp_path, {"zeroamp": {"reduce": "sum"}})


def test_a_malformed_config_is_an_error_before_its_blocks_are_read(tmp_path):
    """Liger's kernels add keys to the block."""
    args = arguments(3, tmp_path, {"zeroamp": None})
    args.use_liger_kernel = True
    with pytest.raises(zeroamp.ConfigError, match="zeroamp must"):
        trainer_of(3, tmp_path, args=args)
