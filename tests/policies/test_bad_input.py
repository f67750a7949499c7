"""Every refusal in its exact words: what DeepSpeed 0.19.8 accepts silently or answers with a cryptic text, and more."""

import pytest

from zeroamp import ConfigError, policy_from_config

AUTOCAST = {"enabled": True, "dtype": "bfloat16"}

BAD = [
    (
        {"zero_optimisation": {}},
        {},
        "zero_optimisation: found a key that neither DeepSpeed 0.19.8 nor zeroamp has; valid: the keys "
        "of the top level in docs/config.md. Did you mean 'zero_optimization'?",
    ),
    (
        {"stage": 3},
        {},
        "stage: found a key that neither DeepSpeed 0.19.8 nor zeroamp has; valid: the keys of the top "
        "level in docs/config.md. Did you mean 'zero_optimization.stage'?",
    ),
    (
        {"torch_autocast": {"enable": True, "dtype": "bf16"}},
        {},
        "torch_autocast.enable: found a key that neither DeepSpeed 0.19.8 nor zeroamp has; valid: dtype, "
        "enabled, lower_precision_safe_modules. Did you mean 'enabled'?",
    ),
    (
        {"zero_optimization": {"stage": 3, "overlap_com": True}},
        {},
        "zero_optimization.overlap_com: found a key that neither DeepSpeed 0.19.8 nor zeroamp has; "
        "valid: the keys of zero_optimization in docs/config.md. Did you mean 'overlap_comm'?",
    ),
    (
        {"torch_autocast": {"enabled": "false"}},
        {},
        "torch_autocast.enabled: found str 'false'; valid: a valid boolean. Change the value; JSON types "
        "are not converted.",
    ),
    (
        {"torch_autocast": {"enabled": 1}},
        {},
        "torch_autocast.enabled: found int 1; valid: a valid boolean. Change the value; JSON types are not converted.",
    ),
    (
        {"torch_autocast": True},
        {},
        "torch_autocast: found bool True; valid: an object of keys. Change the value; JSON types are not converted.",
    ),
    (
        {"torch_autocast": {"enabled": True}},
        {},
        'torch_autocast.dtype: found no dtype; valid: "bfloat16" or "float16". Say which: torch\'s own '
        "default differs by device.",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "int8"}},
        {},
        "torch_autocast.dtype: found str 'int8'; valid: 'fp32', 'float32', 'float', 'bf16', 'bfloat16', "
        "'fp16', 'float16' or 'half'. Change the value.",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "fp32"}},
        {},
        'torch_autocast.dtype: found \'fp32\'; valid: "bfloat16" or "float16". Say which: torch\'s own '
        "default differs by device.",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "foo"}},
        {},
        "torch_autocast.dtype: found str 'foo'; valid: 'fp32', 'float32', 'float', 'bf16', 'bfloat16', "
        "'fp16', 'float16' or 'half'. Change the value.",
    ),
    (
        {"torch_autocast": {**AUTOCAST, "lower_precision_safe_modules": "torch.nn.Linear"}},
        {},
        "torch_autocast.lower_precision_safe_modules: found str 'torch.nn.Linear'; valid: 'auto' or a "
        "list. Change the value; JSON types are not converted.",
    ),
    (
        {"torch_autocast": {**AUTOCAST, "lower_precision_safe_modules": [1]}},
        {},
        "torch_autocast.lower_precision_safe_modules.0: found int 1; valid: a valid string. Change the "
        "value; JSON types are not converted.",
    ),
    (
        {"torch_autocast": AUTOCAST, "bf16": {"enabled": True}},
        {},
        "torch_autocast.enabled and bf16.enabled: found several precision modes at once; valid: at most "
        "one of torch_autocast, bf16, fp16. Keep torch_autocast for per-op precision, bf16 or fp16 for "
        "everything in that dtype.",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "bf16": {"enabled": True}},
        {},
        "torch_autocast.enabled and bf16.enabled: found several precision modes at once; valid: at most "
        "one of torch_autocast, bf16, fp16. Keep torch_autocast for per-op precision, bf16 or fp16 for "
        "everything in that dtype.",
    ),
    (
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        {},
        "bf16.enabled and fp16.enabled: found several precision modes at once; valid: at most one of "
        "torch_autocast, bf16, fp16. Keep torch_autocast for per-op precision, bf16 or fp16 for "
        "everything in that dtype.",
    ),
    (
        {"fp16": {"enabled": True, "loss_scale": 1}},
        {},
        "fp16.loss_scale: found 1, which scales nothing up; valid: 0 (dynamic) or a fixed scale above 1. "
        "Leave it out: small gradients are zero in float16 otherwise.",
    ),
    (
        {"fp16": {"enabled": True, "loss_scale": True}},
        {},
        "fp16.loss_scale: found bool True; valid: a number, which a boolean is not. Change the value; "
        "JSON types are not converted.",
    ),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 128}},
        {},
        "fp16.initial_scale_power: found int 128; valid: less than or equal to 127. Change the value.",
    ),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}},
        {},
        "fp16.min_loss_scale: found 32, above the initial scale 2**4; valid: at most the initial scale. "
        "Lower it, or raise fp16.initial_scale_power.",
    ),
    (
        {"fp16": {"enabled": True, "hysteresis": 0}},
        {},
        "fp16.hysteresis: found int 0; valid: greater than or equal to 1. Change the value.",
    ),
    (
        {"data_types": {"grad_accum_dtype": "fp16"}},
        {},
        'data_types.grad_accum_dtype: found fp16 with compute in fp32; valid: "fp32" or "bf16". float16 '
        "gradients over- and underflow without loss scaling, which only float16 compute has.",
    ),
    (
        {"data_types": {"grad_accum_dtype": "int8"}},
        {},
        "data_types.grad_accum_dtype: found str 'int8'; valid: 'fp32', 'float32', 'float', 'bf16', "
        "'bfloat16', 'fp16', 'float16' or 'half'. Change the value.",
    ),
    (
        {"data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_dtype": "fp32"},
        {},
        "gradient_accumulation_dtype: found 'fp32' beside data_types.grad_accum_dtype 'bf16'; valid: one "
        "of the two keys, or both alike. Remove one of them.",
    ),
    (
        {"data_types": {"param_dtype": "bf16"}},
        {},
        "data_types.param_dtype: found 'bf16' with fp32 precision; valid: \"fp32\". It follows from the "
        "enabled bf16 or fp16 block: remove it.",
    ),
    (
        {"data_types": {"buffer_dtype": "int8"}},
        {},
        "data_types.buffer_dtype: found str 'int8'; valid: 'fp32', 'float32', 'float', 'bf16', "
        "'bfloat16', 'fp16', 'float16' or 'half'. Change the value.",
    ),
    (
        {"data_types": {"keep_in_fp32_modules": "norm"}},
        {},
        "data_types.keep_in_fp32_modules: found str 'norm'; valid: 'auto' or a list. Change the value; "
        "JSON types are not converted.",
    ),
    (
        {"fp16": {"enabled": True, "loss_scale": 0.5}},
        {},
        "fp16.loss_scale: found 0.5, which scales nothing up; valid: 0 (dynamic) or a fixed scale above "
        "1. Leave it out: small gradients are zero in float16 otherwise.",
    ),
    (
        {"optimizer": {"type": "AdamW", "lr": 0.001}},
        {},
        "optimizer.lr: found a key that neither DeepSpeed 0.19.8 nor zeroamp has; valid: legacy_fusion, "
        "params, type. Did you mean 'optimizer.params.lr'?",
    ),
    (
        {"scheduler": {"type": "OneCycle"}},
        {},
        "scheduler.params.cycle_min_lr: found no such key; valid: a value. Add it: it has no default.\n"
        "scheduler.params.cycle_max_lr: found no such key; valid: a value. Add it: it has no default.",
    ),
    (
        {"zero_optimization": {"max_live_parameters": 5}},
        {},
        "zero_optimization.max_live_parameters: found 5, which is not supported; valid: no such key. "
        "Write stage3_max_live_parameters.",
    ),
    (
        {"bf16": {"enabled": "auto"}},
        {},
        'bf16.enabled: found "auto" and no argument that fills it; valid: a value. Pass it: '
        "policy_from_config(cfg, bf16=...), or --auto bf16=... on the command line.",
    ),
    (
        {"zero_optimization": {"reduce_bucket_size": "auto"}},
        {"hidden_size": -8},
        "the argument hidden_size: found int -8; valid: a width, a whole number. Pass the model's own.",
    ),
    (
        {"gradient_clipping": "auto"},
        {"gradient_clipping": {"a.b": 1}},
        "the argument gradient_clipping: found the key 'a.b'; valid: keys that are words without dots. "
        "Write an object in an object for what has a dot.",
    ),
    (
        {"\ud800": 1},
        {},
        "config: found the key '\\ud800'; valid: keys that are words without dots. Write an object in an "
        "object for what has a dot.",
    ),
    (
        {"communication_data_type": "int8"},
        {},
        "communication_data_type: found str 'int8'; valid: 'fp32', 'float32', 'float', 'bf16', "
        "'bfloat16', 'fp16', 'float16' or 'half'. Change the value.",
    ),
    (
        {"communication_data_type": "bf16"},
        {},
        "communication_data_type: found bf16 at stage 0 with zeroamp.reduce_accumulate_dtype fp32; "
        'valid: "fp32", or reduce_accumulate_dtype "native", or stage 1 and above. Stage 0 is an '
        "all-reduce, which sums on the way: a sum in fp32 needs fp32 on the wire.",
    ),
    (
        {"torch_autocast": AUTOCAST, "communication_data_type": "fp16", "zero_optimization": {"stage": 2}},
        {},
        'communication_data_type: found fp16; valid: "fp32" or "bf16". float16 gradients over- and '
        "underflow without loss scaling, which only float16 compute has.",
    ),
    (
        {"fp16": {"enabled": True}, "zeroamp": {"reduce_accumulate_dtype": "native"}},
        {},
        'zeroamp.reduce_accumulate_dtype: found native at stage 0 with fp16 on the wire; valid: "fp32", '
        'or communication_data_type "fp32" or "bf16". An all-reduce of fp16 divides after it has summed, '
        "and overflows.",
    ),
    (
        {"zero_optimization": {"stage": 4}},
        {},
        "zero_optimization.stage: found int 4; valid: 0, 1, 2 or 3. Change the value.",
    ),
    (
        {"zero_optimization": {"stage": True}},
        {},
        "zero_optimization.stage: found bool True; valid: an integer: 0, 1, 2 or 3. Change the value; "
        "JSON types are not converted.",
    ),
    (
        {"zero_optimization": {"stage": 2.0}},
        {},
        "zero_optimization.stage: found float 2.0; valid: an integer: 0, 1, 2 or 3. Change the value; "
        "JSON types are not converted.",
    ),
    (
        {"zero_optimization": {"zero_hpz_partition_size": 2, "stage": 2}},
        {},
        "zero_optimization.zero_hpz_partition_size: found 2 at stage 2; valid: 1, or stage 3. Only stage "
        "3 gathers a second time, for the backward, which a smaller partition makes cheaper.",
    ),
    (
        {"zero_optimization": {"zero_quantized_weights": True}},
        {},
        "zero_optimization.zero_quantized_weights: found true, which is not supported; valid: false. "
        "Remove it: quantized communication is not there; safe modules already travel in 16 bits.",
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "nvme"}, "stage": 3}},
        {},
        "zero_optimization.offload_param.device: found str 'nvme'; valid: 'none' or 'cpu'. Change the value.",
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "cpu"}, "stage": 2}},
        {},
        'zero_optimization.offload_param.device: found "cpu" at stage 2; valid: "none", or stage 3. '
        "offload_optimizer is for the others.",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu", "pin_memory": False},
            }
        },
        {},
        "zero_optimization.offload_optimizer.pin_memory: found another value than "
        "zero_optimization.offload_param.pin_memory; valid: the same value twice. FSDP2 offloads both "
        "together.",
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {},
        "zero_optimization.offload_optimizer.ratio: found 0.5, which is not supported; valid: 1.0. "
        "Remove it: FSDP2 moves all of the optimizer state or none of it.",
    ),
    (
        {"zero_optimization": {"cpu_offload": True}},
        {},
        "zero_optimization.cpu_offload: found true, which is not supported; valid: false. Write "
        '"offload_optimizer": {"device": "cpu"}.',
    ),
    (
        {"zero_optimization": {"reduce_bucket_size": "5e8"}},
        {},
        "zero_optimization.reduce_bucket_size: found str '5e8'; valid: a valid integer. Change the "
        "value; JSON types are not converted.",
    ),
    (
        {"zero_optimization": {"reduce_bucket_size": 0.5}},
        {},
        "zero_optimization.reduce_bucket_size: found float 0.5; valid: a valid integer. Change the "
        "value; JSON types are not converted.",
    ),
    (
        {"gradient_accumulation_steps": 0},
        {},
        "gradient_accumulation_steps: found int 0; valid: greater than or equal to 1. Change the value.",
    ),
    (
        {"gradient_accumulation_steps": True},
        {},
        "gradient_accumulation_steps: found bool True; valid: a valid integer. Change the value; JSON "
        "types are not converted.",
    ),
    (
        {"gradient_clipping": True},
        {},
        "gradient_clipping: found bool True; valid: a number, which a boolean is not. Change the value; "
        "JSON types are not converted.",
    ),
    (
        {"gradient_clipping": float("inf")},
        {},
        "gradient_clipping: found float inf; valid: a finite number. Change the value.",
    ),
    (
        {"gradient_clipping": -1},
        {},
        "gradient_clipping: found int -1; valid: greater than or equal to 0. Change the value.",
    ),
    (
        {"prescale_gradients": True},
        {},
        "prescale_gradients: found true, which is not supported; valid: false. Remove it: gradients are "
        "summed in fp32 and divided after, so that nothing over- or underflows before.",
    ),
    (
        {"gradient_allreduce_op": "sum"},
        {},
        'gradient_allreduce_op: found "sum", which is not supported; valid: "mean". Multiply the loss by '
        "the number of ranks.",
    ),
    (
        {"amp": {"enabled": True}},
        {},
        'amp: found {"enabled": true}, which is not supported; valid: false. Write torch_autocast: it is '
        "what replaced Apex AMP.",
    ),
    (
        {"fp32_allreduce": True},
        {},
        'fp32_allreduce: found true, which is not supported; valid: false. Write "communication_data_type": "fp32".',
    ),
    (
        {"sparse_gradients": True},
        {},
        "sparse_gradients: found true, which is not supported; valid: false. Remove it: DeepSpeed 0.19.8 "
        "has removed it too.",
    ),
    (
        {"comet": {"enabled": True}},
        {},
        "comet.enabled: found true, which is not supported; valid: false. Use tensorboard, csv_monitor or wandb, or "
        "add a watcher of your own to TrainStep.watchers.",
    ),
    (
        {"flops_profiler": {"enabled": True}},
        {},
        "flops_profiler.enabled: found true, which is not supported; valid: false. Use zeroamp.count_flops(model, "
        "batch) before wrap_model, and RunReport(flops_per_step=).",
    ),
    (
        {"comms_logger": {"enabled": False}, "zeroamp": {"count_traffic": True}},
        {},
        "comms_logger.enabled: found False beside zeroamp.count_traffic True; valid: one of the two "
        "keys, or both alike. Remove one of them.",
    ),
    (
        {"zeroamp": {"dp_replicate_size": 2}},
        {},
        "zeroamp.dp_replicate_size: found 2 at stage 0; valid: 1, or stage 1 and above. Stage 0 "
        "replicates over all ranks already.",
    ),
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
        {},
        "gradient_accumulation_steps: found no value beside train_batch_size 32 and "
        "train_micro_batch_size_per_gpu 4, and no number of ranks to derive it from; valid: a value, or "
        "a known number of ranks. Pass world_size= to policy_from_config (--world-size on the command "
        "line), start with torchrun, or set the key.",
    ),
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5},
        {"world_size": 2},
        "train_batch_size: found 32; valid: a multiple of 10 = train_micro_batch_size_per_gpu 5 x 2 "
        "ranks. Change one of them; nothing is rounded.",
    ),
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {"world_size": 2},
        "train_batch_size: found 32; valid: 16 = 4 train_micro_batch_size_per_gpu x 2 "
        "gradient_accumulation_steps x 2 ranks. Change one of them, or leave one out: it is derived. On "
        "a mesh of fewer ranks than the job has, pass world_size=mesh.size() to policy_from_config.",
    ),
    (
        {"train_batch_size": 7, "gradient_accumulation_steps": 2},
        {},
        "train_batch_size: found 7; valid: a multiple of 2 = 2 gradient_accumulation_steps. Change one "
        "of them, or leave one out: it is derived. On a mesh of fewer ranks than the job has, pass "
        "world_size=mesh.size() to policy_from_config.",
    ),
    (
        {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"},
        {},
        'train_micro_batch_size_per_gpu: found "auto" and no argument that fills it; valid: a value. '
        "Pass it: policy_from_config(cfg, train_micro_batch_size_per_gpu=...), or --auto "
        'train_micro_batch_size_per_gpu=... on the command line.\ngradient_clipping: found "auto" and no '
        "argument that fills it; valid: a value. Pass it: policy_from_config(cfg, "
        "gradient_clipping=...), or --auto gradient_clipping=... on the command line.",
    ),
    (
        {"gradient_clipping": "auto"},
        {"gradient_cliping": 1.0},
        "the argument gradient_cliping: found 1.0, which fills no key of the config; valid: "
        'gradient_clipping. Write "auto" as the value of gradient_cliping in the config, or leave the '
        "argument out.",
    ),
    (
        {"gradient_clipping": 2.0},
        {"gradient_clipping": 1.0},
        "gradient_clipping: found 2.0 beside the argument gradient_clipping=1.0; valid: one value, or "
        '"auto" in the config. Remove one of them.',
    ),
    (
        {"gradient_clipping": 2.0},
        {"world_size": "2"},
        "the argument world_size: found str '2'; valid: a whole number from 1 on. Pass the ranks.",
    ),
    (
        {"zero_optimization.stage": 3},
        {},
        "config: found the key 'zero_optimization.stage'; valid: keys that are words without dots. Write "
        "an object in an object for what has a dot.",
    ),
    (
        "{}",
        {},
        "config: found a string of JSON; valid: a mapping, or the path of a JSON file. Call json.loads on it first.",
    ),
    (
        "no/such/file.json",
        {},
        "config: found no readable file at 'no/such/file.json' ([Errno 2] No such file or directory: "
        "'no/such/file.json'); valid: the path of a JSON file. Check the path.",
    ),
    ([], {}, "config: found list []; valid: a mapping, or the path of a JSON file. Pass one of them."),
]


@pytest.mark.parametrize(("cfg", "arguments", "text"), BAD, ids=[str(row[0])[:60] for row in BAD])
def test_bad_input_is_refused_in_these_words(monkeypatch, cfg, arguments, text):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError) as caught:
        policy_from_config(cfg, **arguments)
    assert str(caught.value) == text
