"""Every refusal of a config: the key, the value found, and what to do.

What DeepSpeed 0.19.8 accepts silently or answers with a cryptic text, and more.
"""

import logging

import pytest

from zeroamp import CheckpointError, ConfigError, policy_from_config
from zeroamp.optimizers.optimizer_params import OPTIMIZER_PARAMS
from zeroamp.optimizers.scheduler_params import SCHEDULER_PARAMS
from zeroamp.policies.json_values import nest
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import Honoured, iter_keys

ADAM = {"optimizer.type": "Adam"}
AUTOCAST = {"torch_autocast.enabled": True, "torch_autocast.dtype": "bf16"}
BAD_VALUES = [
    ({"zero_optimisation": {}}, "is a key of neither", "zero_optimization"),
    ({"zero_optimization.overlap_com": True, "zero_optimization.stage": 3}, "is a key of neither", "overlap_comm"),
    ({"torch_autocast.enabled": "false"}, 'is the string "false"', "Remove the quotes"),
    ({"torch_autocast": True}, "is true", 'Write {"enabled": true, "dtype": "bfloat16"}.'),
    ({"clip": 1}, "is a key of neither", "Did you mean 'gradient_clipping'?"),
    ({"bf16.param_dtype": "bf16"}, "is a key of neither", "Remove it: torch_autocast, bf16 or"),
    ({"optimizer.type": "OneBitAdam"}, 'is "OneBitAdam"', "Build the optimizer yourself"),
    ({"torch_autocast.dtype": "int8", "torch_autocast.enabled": True}, 'is "int8"', "Change the value"),
    ({"torch_autocast.dtype": "fp32", "torch_autocast.enabled": True}, 'is "fp32"', "Write one of them"),
    (
        {"torch_autocast.lower_precision_safe_modules": "torch.nn.Linear", **AUTOCAST},
        'is "torch.nn.Linear"',
        "Put it in a list",
    ),
    ({"fp16.initial_scale_power": 128, "fp16.enabled": True}, "is 128", "Change the value"),
    ({"fp16.min_loss_scale": 32, "fp16.enabled": True, "fp16.initial_scale_power": 4}, "is 32", "Lower it, or raise"),
    ({"data_types.grad_accum_dtype": "fp16"}, 'is "fp16"', "float16 gradients over- and underflow without"),
    ({"gradient_accumulation_dtype": "fp32"}, "neither", "data_types.grad_accum_dtype"),
    ({"data_types.param_dtype": "bf16"}, 'is "bf16"', "Remove it: only an enabled bf16"),
    ({"fp16.loss_scale": 1, "fp16.enabled": True}, "is 1", "Leave it out: small gradients are"),
    ({"optimizer.lr": 0.001, "optimizer.type": "AdamW"}, "is a key of neither", "optimizer.params.lr"),
    (
        {"zero_optimization.max_live_parameters": 5, "zero_optimization.stage3_max_live_parameters": 6},
        "is 5",
        "is 6. Remove one of them",
    ),
    ({"bf16.enabled": "auto"}, 'is "auto"', "Pass a value: policy_from_config(cfg,"),
    ({"communication_data_type": "bf16"}, 'is "bf16"', "Stage 0 runs an all-reduce"),
    (
        {"communication_data_type": "fp16", **AUTOCAST, "zero_optimization.stage": 2},
        'is "fp16"',
        "float16 gradients over- and underflow without",
    ),
    (
        {"zeroamp.reduce_accumulate_dtype": "native", "fp16.enabled": True},
        'is "native"',
        "at stage 0 with communication_data_type in fp16",
    ),
    ({"zero_optimization.stage": True}, "is true", "Change the value"),
    ({"zero_optimization.zero_hpz_partition_size": 2, "zero_optimization.stage": 2}, "is 2", "Remove it: only stage 3"),
    ({"zero_optimization.offload_param.device": "nvme", "zero_optimization.stage": 3}, 'is "nvme"', 'Write "cpu"'),
    (
        {
            "zero_optimization.offload_optimizer.ratio": 0.5,
            "zero_optimization.stage": 1,
            "zero_optimization.offload_optimizer.device": "cpu",
        },
        "is 0.5",
        "Remove it: all of the optimizer state",
    ),
    ({"zero_optimization.cpu_offload": True}, "is true", 'Write "offload_optimizer"'),
    ({"zero_optimization.stage3_prefetch_bucket_size": 0.5}, "is 0.5", "Change the value"),
    ({"zero_optimization.stage3_max_live_parameters": 1e19}, "must be at most 9223372036854775807, but is 1e", ""),
    ({"zero_optimization.stage3_max_live_parameters": 1e308}, "must be at most 9223372036854775807, but is 1e", ""),
    ({"zeroamp.overrides": {"modules": "head", "compute": "fp32"}}, "must be a list, but is", "Put it in a list"),
    ({"zeroamp.shard_dim": "1"}, 'must be "auto" or 0, but is the string "1"', "Change the"),
    ({"zeroamp.shard_dim": False}, "is false", "Change the value"),
    ({"gradient_clipping": -1}, "is -1", "Change the value"),
    ({"gradient_allreduce_op": "sum"}, 'is "sum"', 'Write "zeroamp": {"reduce": "sum"}'),
    ({"fp32_allreduce": True}, "is true", 'Write "communication_data_type"'),
    ({"_comment": "a template"}, "is a key of neither", "JSON has no comments"),
    ({"fsdp": {"version": 2}}, "is a key of neither", "set zero_optimization.stage"),
    ({"activation_checkpointing.enabled": True}, "is a key of neither", "gradient_checkpointing_enable()"),
    ({"zeroamp.dp_replicate_size": 2}, "is 2", "Stage 0 replicates over all ranks already"),
    ({"optimizer.type": "AdmaW"}, 'is "AdmaW"', "Did you mean 'AdamW'?"),
    ({"optimizer.legacy": True, "optimizer.type": "SGD"}, "is a key of neither", "legacy_fusion"),
    ({"optimizer.params.weight_decy": 0.1, "optimizer.type": "AdamW"}, "is not supported", "weight_decay"),
    ({"optimizer.params.momentum": 0.1, **ADAM}, "is not supported", "does not ignore unknown keys"),
    ({"optimizer.params.max_grad_norm": 1.0, **ADAM}, "is 1.0", 'Write "gradient_clipping" at the top'),
    ({"optimizer.params.bias_correction": False, **ADAM}, "is false", "Remove it: torch's Adam always"),
    ({"optimizer.params.adam_w_mode": False, "optimizer.type": "AdamW"}, "is false", 'Write "type": "Adam"'),
    ({"optimizer.params.lr": "1e-3", "optimizer.type": "SGD"}, 'is the string "1e-3"', "Remove the quotes"),
    ({"scheduler.type": "WarmupCosLR"}, 'is "WarmupCosLR"', "WarmupCosineLR"),
    ({"scheduler.type": "OneCycle"}, 'is "OneCycle"', "CyclicLR in place of OneCycle"),
    ({"scheduler.params.last_batch_iteration": 3, "scheduler.type": "WarmupLR"}, "is 3", "pass the saved state to"),
    ({"scheduler.params.warmup_type": "cosine", "scheduler.type": "WarmupLR"}, 'is "cosine"', "Change the value"),
    ({"scheduler.params.warmup_num_steps": 0, "scheduler.type": "WarmupLR"}, "is 0", "Change the value"),
    ({"scheduler.params.warmup_max_lr": float("inf"), "scheduler.type": "WarmupLR"}, "is Infinity", "Change the value"),
]
"""Keys and values, of which the first one is refused; what is found, and what to do."""
BAD = [
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype", "is left out", "Write one of them"),
    (
        {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "bf16": {"enabled": True}},
        "torch_autocast.enabled and bf16.enabled",
        "are true",
        "Keep torch_autocast for per-op precision",
    ),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps", "is missing", "Add it"),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}},
        "optimizer.params.betas.1",
        "is 1",
        "Change the value",
    ),
    ({"optimizer": {}}, "optimizer.type", "is missing", "Add it"),
    (
        {"compile": {"backend": "inductor", "deepcompile": True}},
        "compile",
        "deepcompile true",
        "Call torch.compile on",
    ),
    ({"\ud800": 1}, "config", "'\\ud800'", "Write the part after a dot as a key of an"),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu", "pin_memory": False},
            }
        },
        "zero_optimization.offload_optimizer.pin_memory",
        "is true",
        "Write the same value in both",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zeroamp": {"offload_between_steps": []}},
        "zeroamp.offload_between_steps",
        "is [], but zero_optimization.offload_optimizer.device",
        "Remove one of them",
    ),
    (
        {"zero_optimization.stage": 3},
        "config",
        "'zero_optimization.stage'",
        "Write the part after a dot as a key of an",
    ),
    ("{}", "config", "is the JSON text itself", "Call json.loads on it first"),
    ("no/such/file.json", "config", "cannot be read", "Check the path of the file"),
    ([], "config", "is the list []", "Pass one of these two"),
]
BAD_WITH_ARGUMENTS = [
    (
        {"zero_optimization": {"stage3_prefetch_bucket_size": "auto"}},
        {"hidden_size": 2**24},
        "the argument hidden_size",
        "must be a whole number from 1 to 16,777,215, but is 16777216",
        "Pass the model's hidden size",
    ),
    (
        {"gradient_clipping": "auto"},
        {"gradient_clipping": {"a.b": 1}},
        "the argument gradient_clipping",
        "'a.b'",
        "Write the part after a dot as a key of an",
    ),
    (
        {"gradient_clipping": 2.0},
        {"world_size": "2"},
        "the argument world_size",
        'is the string "2"',
        "Pass the number of ranks",
    ),
]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def _check(cfg, arguments, key, value, remedy):
    with pytest.raises(ConfigError) as caught:
        policy_from_config(cfg, **arguments)
    text = str(caught.value)
    assert text.startswith(f"{key} ")
    assert value in text
    assert remedy in text


@pytest.mark.parametrize(("flat", "value", "remedy"), BAD_VALUES, ids=[str(row[0])[:60] for row in BAD_VALUES])
def test_a_bad_value_is_refused_with_key_value_and_remedy(flat, value, remedy):
    _check(nest(flat), {}, next(iter(flat)), value, remedy)


@pytest.mark.parametrize(("cfg", "key", "value", "remedy"), BAD, ids=[str(row[0])[:60] for row in BAD])
def test_bad_input_is_refused_with_key_value_and_remedy(cfg, key, value, remedy):
    _check(cfg, {}, key, value, remedy)


@pytest.mark.parametrize(("cfg", "arguments", "key", "value", "remedy"), BAD_WITH_ARGUMENTS, ids=str)
def test_bad_arguments_are_refused_with_key_value_and_remedy(cfg, arguments, key, value, remedy):
    _check(cfg, arguments, key, value, remedy)


def test_every_bad_key_has_a_line():
    params = {"lr": -1, "lrr": 1, "max_grad_norm": 1.0, "betas": [0.9, 2]}
    with pytest.raises(ConfigError) as caught:
        policy_from_config({
            "scheduler": {"type": "WarmupDecayLR"}, "gradient_clipping": -1,
            "optimizer": {"type": "Adam", "params": params},
        })  # fmt: skip
    keys = [line.split()[0] for line in str(caught.value).splitlines()]
    of_params = [f"optimizer.params.{key}" for key in ("lr", "max_grad_norm", "betas.1", "lrr")]
    assert keys == ["gradient_clipping", *of_params, "scheduler.params.total_num_steps"]


def _with_params(block, types):
    for name, params in types.items():
        needed = {"total_num_steps": 10} if "total_num_steps" in params.model_fields else {}
        for key in params.model_fields:
            path = f"{block}.params.{key}"
            yield (
                path,
                lambda number, path=path, name=name, needed=needed: nest(
                    {f"{block}.type": name, **{f"{block}.params.{each}": value for each, value in needed.items()}}
                    | {path: number}
                ),
            )


CONFIGS = [
    *((key.path, lambda number, path=key.path: nest({path: number})) for key in iter_keys(Config)
      if isinstance(key.key_class, Honoured)),
    *_with_params("scheduler", SCHEDULER_PARAMS),
    *_with_params("optimizer", OPTIMIZER_PARAMS),
]  # fmt: skip


@pytest.mark.parametrize("number", [10**400, -(10**400), [10**400], [10**400, 10**400]], ids=["+", "-", "list", "pair"])
def test_a_number_too_large_for_any_machine_is_refused(number):
    accepted = []
    for path, make in CONFIGS:
        try:
            policy_from_config(make(number))
        except ConfigError:
            continue
        accepted.append(path)
    assert accepted == []
    assert len(CONFIGS) > 60


@pytest.mark.parametrize("block", ["zero_optimization", "fp16", None])
def test_no_key_or_value_reaches_the_terminal_as_an_escape(block):
    for cfg in ({"\x1b]0;owned\x07": 1}, {"enabled": "\x1b[31m"}, {"\x9b2J": {"a": 1}}, {"a\u202eb": 1}):
        with pytest.raises(ConfigError) as raised:
            policy_from_config({block: cfg} if block else cfg)
        assert all(character.isprintable() or character == "\n" for character in str(raised.value))


def test_a_name_in_any_error_is_printed_without_control_characters():
    assert str(CheckpointError("a\x1b[31mb\x07\u202e\nc é")) == "a\\x1b[31mb\\x07\\u202e\nc é"
    assert str(ConfigError("plain")) == "plain"


def test_a_name_in_a_log_message_is_printed_without_control_characters(caplog):
    logging.getLogger("zeroamp").warning("%s is not used, %d times.\n", "a\x1b[31mb\x07", 2)
    assert caplog.messages == ["a\\x1b[31mb\\x07 is not used, 2 times.\n"]
