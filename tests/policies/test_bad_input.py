"""Every refusal of a config: the key, the value found, and what to do.

What DeepSpeed 0.19.8 accepts silently or answers with a cryptic text, and more.
"""

import logging

import pytest
import torch

from zeroamp import CheckpointError, ConfigError, policy_from_config

AUTOCAST = {"enabled": True, "dtype": "bfloat16"}

BAD = [
    ({"zero_optimisation": {}}, "zero_optimisation", "is a key of neither", "zero_optimization"),
    ({"stage": 3}, "stage", "is a key of neither", "zero_optimization.stage"),
    (
        {"torch_autocast": {"enable": True, "dtype": "bf16"}},
        "torch_autocast.enable",
        "is a key of neither",
        "Did you mean 'enabled'? The keys",
    ),
    (
        {"zero_optimization": {"stage": 3, "overlap_com": True}},
        "zero_optimization.overlap_com",
        "is a key of neither",
        "overlap_comm",
    ),
    ({"torch_autocast": {"enabled": "false"}}, "torch_autocast.enabled", 'is the string "false"', "Remove the quotes"),
    ({"torch_autocast": {"enabled": 1}}, "torch_autocast.enabled", "is 1", "Change the value"),
    ({"torch_autocast": True}, "torch_autocast", "is true", 'Write {"enabled": true, "dtype": "bfloat16"}.'),
    ({"bf16": True}, "bf16", "is true", 'Write {"enabled": true}.'),
    ({"zeroamp": False}, "zeroamp", "is false", "Change the value"),
    ({"clip": 1}, "clip", "is a key of neither", "Did you mean 'gradient_clipping'?"),
    (
        {"bf16": {"param_dtype": "bf16"}},
        "bf16.param_dtype",
        "is a key of neither",
        "Remove it: torch_autocast, bf16 or",
    ),
    ({"fp16": {"dtype": "fp16"}}, "fp16.dtype", "is a key of neither", "Remove it: torch_autocast, bf16 or fp16"),
    ({"foo": 1}, "foo", "is a key of neither", "listed by `zeroamp check --all`"),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", 'is "OneBitAdam"', "Build the optimizer yourself"),
    ({"accumulation_steps": 2}, "accumulation_steps", "is a key", "Did you mean 'gradient_accumulation_steps'?"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype", "is left out", "Write one of them"),
    ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "torch_autocast.dtype", 'is "int8"', "Change the value"),
    ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, "torch_autocast.dtype", 'is "fp32"', "Write one of them"),
    ({"torch_autocast": {"enabled": True, "dtype": "foo"}}, "torch_autocast.dtype", 'is "foo"', "Change the value"),
    (
        {"torch_autocast": {**AUTOCAST, "lower_precision_safe_modules": "torch.nn.Linear"}},
        "torch_autocast.lower_precision_safe_modules",
        'is "torch.nn.Linear"',
        "Put it in a list",
    ),
    (
        {"torch_autocast": {**AUTOCAST, "lower_precision_safe_modules": [1]}},
        "torch_autocast.lower_precision_safe_modules.0",
        "is 1",
        "Change the value",
    ),
    (
        {"torch_autocast": AUTOCAST, "bf16": {"enabled": True}},
        "torch_autocast.enabled and bf16.enabled",
        "are true",
        "Keep torch_autocast for per-op precision",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "bf16": {"enabled": True}},
        "torch_autocast.enabled and bf16.enabled",
        "are true",
        "Keep torch_autocast for per-op precision",
    ),
    (
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "bf16.enabled and fp16.enabled",
        "are true",
        "Keep torch_autocast for per-op precision",
    ),
    ({"fp16": {"enabled": True, "loss_scale": 1}}, "fp16.loss_scale", "is 1", "Leave it out: small gradients are"),
    ({"fp16": {"enabled": True, "loss_scale": True}}, "fp16.loss_scale", "is true", "Change the value"),
    ({"fp16": {"enabled": True, "initial_scale_power": 128}}, "fp16.initial_scale_power", "is 128", "Change the value"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}},
        "fp16.min_loss_scale",
        "is 32",
        "Lower it, or raise",
    ),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis", "is 0", "Change the value"),
    (
        {"data_types": {"grad_accum_dtype": "fp16"}},
        "data_types.grad_accum_dtype",
        'is "fp16"',
        "float16 gradients over- and underflow without",
    ),
    ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype", 'is "int8"', "Change the value"),
    ({"gradient_accumulation_dtype": "fp32"}, "gradient_accumulation_dtype", "neither", "data_types.grad_accum_dtype"),
    ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", 'is "bf16"', "Remove it: only an enabled bf16"),
    ({"data_types": {"buffer_dtype": "int8"}}, "data_types.buffer_dtype", 'is "int8"', "Change the value"),
    (
        {"data_types": {"keep_in_fp32_modules": "norm"}},
        "data_types.keep_in_fp32_modules",
        'is "norm"',
        "Put it in a list",
    ),
    ({"fp16": {"enabled": True, "loss_scale": 0.5}}, "fp16.loss_scale", "is 0.5", "Leave it out: small gradients are"),
    ({"optimizer": {"type": "AdamW", "lr": 0.001}}, "optimizer.lr", "is a key of neither", "optimizer.params.lr"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps", "is missing", "Add it"),
    (
        {"zero_optimization": {"max_live_parameters": 5, "stage3_max_live_parameters": 6}},
        "zero_optimization.max_live_parameters",
        "is 5",
        "is 6. Remove one of them",
    ),
    (
        {"compile": {"backend": "inductor", "deepcompile": True}},
        "compile",
        "deepcompile true",
        "Call torch.compile on",
    ),
    ({"steps_per_print": float("nan")}, "steps_per_print", "is NaN", "Change the value"),
    ({"torch_autocast": {"enabled": True, "dtype": torch.int8}}, "torch_autocast.dtype", 'is "int8"', "Change the"),
    (
        {"torch_autocast": {"enabled": True, "dtype": "torch.torch.bfloat16"}},
        "torch_autocast.dtype",
        'is "torch.torch.bfloat16"',
        "Change the value",
    ),
    ({"bf16": {"enabled": "auto"}}, "bf16.enabled", 'is "auto"', "Pass a value: policy_from_config(cfg,"),
    ({"\ud800": 1}, "config", "'\\ud800'", "Write the part after a dot as a key of an"),
    ({"communication_data_type": "int8"}, "communication_data_type", 'is "int8"', "Change the value"),
    ({"communication_data_type": "bf16"}, "communication_data_type", 'is "bf16"', "Stage 0 runs an all-reduce"),
    (
        {"torch_autocast": AUTOCAST, "communication_data_type": "fp16", "zero_optimization": {"stage": 2}},
        "communication_data_type",
        'is "fp16"',
        "float16 gradients over- and underflow without",
    ),
    (
        {"fp16": {"enabled": True}, "zeroamp": {"reduce_accumulate_dtype": "native"}},
        "zeroamp.reduce_accumulate_dtype",
        'is "native"',
        "Change it, or set communication_data_type",
    ),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "is 4", "Change the value"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "is true", "Change the value"),
    ({"zero_optimization": {"stage": 2.0}}, "zero_optimization.stage", "is 2.0", "Change the value"),
    (
        {"zero_optimization": {"zero_hpz_partition_size": 2, "stage": 2}},
        "zero_optimization.zero_hpz_partition_size",
        "is 2",
        "Remove it: only stage 3",
    ),
    (
        {"zero_optimization": {"zero_quantized_weights": True}},
        "zero_optimization.zero_quantized_weights",
        "is true",
        "Remove it: there is no",
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "nvme"}, "stage": 3}},
        "zero_optimization.offload_param.device",
        'is "nvme"',
        'Write "cpu"',
    ),
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
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "zero_optimization.offload_optimizer.ratio",
        "is 0.5",
        "Remove it: all of the optimizer state",
    ),
    (
        {"zero_optimization": {"cpu_offload": True}},
        "zero_optimization.cpu_offload",
        "is true",
        'Write "offload_optimizer"',
    ),
    (
        {"zero_optimization": {"stage3_prefetch_bucket_size": "5e8"}},
        "zero_optimization.stage3_prefetch_bucket_size",
        'is the string "5e8"',
        "Remove the quotes",
    ),
    (
        {"zero_optimization": {"stage3_prefetch_bucket_size": 0.5}},
        "zero_optimization.stage3_prefetch_bucket_size",
        "is 0.5",
        "Change the value",
    ),
    ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage", 'is the string "2"', "Remove the quotes"),
    ({"zero_optimization": {"stage": "7"}}, "zero_optimization.stage", 'is the string "7"', "Change the value"),
    ({"gradient_accumulation_steps": "0"}, "gradient_accumulation_steps", 'is the string "0"', "Remove the quotes"),
    ({"zeroamp": {"shard_dim": "0"}}, "zeroamp.shard_dim", 'is the string "0"', "Remove the quotes"),
    ({"zeroamp": {"shard_dim": "1"}}, "zeroamp.shard_dim", 'must be "auto" or 0, but is the string "1"', "Change the"),
    ({"zeroamp": {"shard_dim": False}}, "zeroamp.shard_dim", 'must be "auto" or 0, but is false', "Change the value"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps", "is 0", "Change the value"),
    ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps", "is true", "Change the value"),
    ({"gradient_clipping": True}, "gradient_clipping", "is true", "Change the value"),
    ({"gradient_clipping": float("inf")}, "gradient_clipping", "is Infinity", "Change the value"),
    ({"gradient_clipping": -1}, "gradient_clipping", "is -1", "Change the value"),
    ({"prescale_gradients": True}, "prescale_gradients", "is true", "Remove it: gradients are summed"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", 'is "sum"', 'Write "zeroamp": {"reduce": "sum"}'),
    ({"amp": {"enabled": True}}, "amp", 'is {"enabled": true}', "Write torch_autocast"),
    ({"fp32_allreduce": True}, "fp32_allreduce", "is true", 'Write "communication_data_type"'),
    ({"sparse_gradients": True}, "sparse_gradients", "is true", "Remove it: DeepSpeed 0.19.8 has"),
    ({"comet": {"enabled": True}}, "comet.enabled", "is true", "Remove it, and append"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled", "is true", "FlopCounterMode"),
    ({"csv_monitor": {"enabled": True}}, "csv_monitor.enabled", "is true", "zeroamp.RunReport(train, path)"),
    ({"tensorboard": {"enabled": True}}, "tensorboard.enabled", "is true", "SummaryWriter.add_scalar"),
    ({"wandb": {"enabled": True}}, "wandb.enabled", "is true", "wandb.log"),
    (
        {"zeroamp": {"dp_replicate_size": 2}},
        "zeroamp.dp_replicate_size",
        "is 2",
        "Stage 0 replicates over all ranks already",
    ),
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
        "gradient_accumulation_steps",
        "is missing",
        "Pass world_size= to policy_from_config",
    ),
    ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size", "is 7", "Change one of them"),
    (
        {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"},
        "train_micro_batch_size_per_gpu",
        'is "auto"',
        "Pass a value: policy_from_config(cfg",
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
        {"hidden_size": -8},
        "the argument hidden_size",
        "is -8",
        "Pass the model's hidden size",
    ),
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
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5},
        {"world_size": 2},
        "train_batch_size",
        "is 32",
        "Change one of them",
    ),
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {"world_size": 2},
        "train_batch_size",
        "is 32",
        "Change one of them",
    ),
    (
        {"gradient_clipping": "auto"},
        {"gradient_cliping": 1.0},
        "the argument gradient_cliping",
        "is 1.0",
        'Leave it out, or write "auto" as',
    ),
    ({"gradient_clipping": 2.0}, {"gradient_clipping": 1.0}, "gradient_clipping", "is 2.0", "Remove one of them"),
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


@pytest.mark.parametrize(("cfg", "key", "value", "remedy"), BAD, ids=[str(row[0])[:60] for row in BAD])
def test_bad_input_is_refused_with_key_value_and_remedy(cfg, key, value, remedy):
    _check(cfg, {}, key, value, remedy)


@pytest.mark.parametrize(("cfg", "arguments", "key", "value", "remedy"), BAD_WITH_ARGUMENTS, ids=str)
def test_bad_arguments_are_refused_with_key_value_and_remedy(cfg, arguments, key, value, remedy):
    _check(cfg, arguments, key, value, remedy)


def test_every_bad_key_has_a_line():
    with pytest.raises(ConfigError) as caught:
        policy_from_config({"scheduler": {"type": "WarmupDecayLR"}, "gradient_clipping": -1})
    keys = [line.split()[0] for line in str(caught.value).splitlines()]
    assert keys == ["gradient_clipping", "scheduler.params.total_num_steps"]


@pytest.mark.parametrize(
    "key",
    [
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
    ],
)
def test_a_number_of_elements_of_more_than_64_bits_is_refused_by_name(key):
    for value in (1e19, 1e308):
        with pytest.raises(
            ConfigError, match=rf"zero_optimization\.{key} must be at most 9223372036854775807, but is 1e"
        ):
            policy_from_config({"zero_optimization": {"stage": 3, key: value}})
    policy_from_config({"zero_optimization": {"stage": 3, key: 5e8}})


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
