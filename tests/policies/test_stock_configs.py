"""Configs as other projects ship them for DeepSpeed load with the arguments that their loaders have."""

import json

import pytest
import torch

from zeroamp import ConfigError, open_auto_keys, policy_from_config
from zeroamp.reporting.key_report import report_rows

TRANSFORMERS_ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {
        "enabled": "auto",
        "initial_scale_power": 16,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "steps_per_print": 1e5,
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "nvme_path": "/local_nvme"},
        "offload_param": {"device": "cpu", "pin_memory": True, "nvme_path": "/local_nvme"},
        "overlap_comm": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1},
}
KNOWN = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": True,
    "fp16": False,
    "hidden_size": 64,
    "lr": 1e-4,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.01,
    "warmup_min_lr": 0.0,
    "warmup_num_steps": 10,
}
"""What a loader knows of a run, whatever the config asks for."""


def test_a_stock_config_loads_from_a_file_with_the_open_keys_filled(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TRANSFORMERS_ZERO3))
    wanted = {argument for arguments in open_auto_keys(path).values() for argument in arguments}
    policy = policy_from_config(path, world_size=2, **{key: KNOWN[key] for key in wanted & KNOWN.keys()})
    assert policy == policy_from_config(json.loads(str(policy)), world_size=2)
    assert (policy.mode, policy.train_batch_size) == ("bf16", 16)
    status = {row["key"]: row["status"] for row in report_rows(policy)}
    assert status["zero_optimization.offload_param.nvme_path"] == status["aio.queue_depth"] == "native"
    assert (policy.prefetch_bucket_size, policy.param_persistence_threshold) == (int(0.9 * 64 * 64), 640)
    assert policy.gather_16bit_weights_on_save


def test_a_second_name_is_the_key_itself():
    long = policy_from_config({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5}})
    short = policy_from_config({"zero_optimization": {"stage": 3, "max_live_parameters": 5}})
    assert short == long
    assert dict(short.given)["zero_optimization.stage3_max_live_parameters"] == 5
    both = {"stage": 3, "max_live_parameters": 5, "stage3_max_live_parameters": 5}
    assert policy_from_config({"zero_optimization": both}) == long
    assert long.replace(zero_optimization={"stage": 3, "max_live_parameters": 5}) == long


@pytest.mark.parametrize("dtype", ["torch.bfloat16", torch.bfloat16, "bf16"], ids=repr)
def test_a_dtype_by_any_of_its_names(dtype):
    policy = policy_from_config({"torch_autocast": {"enabled": True, "dtype": dtype}, "communication_data_type": dtype,
                                 "zero_optimization": {"stage": 2}})  # fmt: skip
    assert (policy.low_dtype, policy.communication_data_type) == (torch.bfloat16, torch.bfloat16)
    assert policy_from_config(json.loads(str(policy))) == policy


def test_an_infinite_number_of_steps_between_prints_is_never():
    never = policy_from_config({"steps_per_print": float("inf")})
    assert never == policy_from_config({})
    assert json.loads(str(never)) == {"steps_per_print": 0}
    assert policy_from_config({"steps_per_print": 2e3}).steps_per_print == 2000


def test_open_auto_keys_lists_what_fills_each():
    """Open auto keys lists what fills each and not what is auto by itself."""
    cfg = {
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 1.0,
        "data_types": {"keep_in_fp32_modules": "auto"},
        "zero_optimization": {"prefetch_bucket_size": "auto"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }
    assert open_auto_keys(cfg) == {
        "bf16.enabled": ("bf16.enabled", "bf16"),
        "scheduler.params.warmup_max_lr": ("scheduler.params.warmup_max_lr", "warmup_max_lr", "lr"),
        "zero_optimization.stage3_prefetch_bucket_size": (
            "zero_optimization.stage3_prefetch_bucket_size",
            "stage3_prefetch_bucket_size",
            "hidden_size",
        ),
    }
    for names in open_auto_keys(cfg).values():
        for name in names:
            with pytest.raises(ConfigError) as caught:
                policy_from_config(cfg, **{name: 8})
            assert f"argument {name} is" not in str(caught.value)  # it fills its key; others are open
    assert open_auto_keys({}) == {}
    with pytest.raises(ConfigError, match="cannot be read"):
        open_auto_keys("nowhere.json")
