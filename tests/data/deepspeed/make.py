"""Writes the checkpoints of this folder with DeepSpeed 0.19.8 on the CPU, and beside each what DeepSpeed says is in it.

    DS_ACCELERATOR=cpu PYTHONPATH=<repository> python tests/data/deepspeed/make.py

Needs deepspeed, torch 2.13 and safetensors; no test imports it. `expected.safetensors` holds fp32/NAME, exp_avg/NAME
and exp_avg_sq/NAME of every trained parameter, as DeepSpeed's own accessors return them from the live engine; its
zero_to_fp32 reads the same weights back from the files, where it can.
"""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file

from tests.models.deepspeed import batch, build, param_groups

HERE = Path(__file__).parent
NUM_STEPS = 3
NEVER_STEPPED = {"fp16": {"enabled": True, "initial_scale_power": 30}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 14, "hysteresis": 1, "loss_scale_window": 2}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 10}}}
CASES = {  # name -> (ranks, stage, config, keys of zero_optimization)
    "stage0_autocast": (2, 0, AUTOCAST, {}),
    "stage1_autocast": (2, 1, AUTOCAST, {}),
    "stage1_bf16": (2, 1, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, {}),  # by BF16_Optimizer
    "stage1_fp16": (2, 1, FP16, {}),
    "stage1_fp16_never_stepped": (2, 1, NEVER_STEPPED, {}),
    "stage2_autocast": (3, 2, AUTOCAST, {"parameter_alignment": True, "round_robin_gradients": True}),
    "stage2_bf16": (2, 2, BF16, {"elastic_checkpoint": True}),
    "stage2_fp16": (2, 2, FP16 | WARMUP, {}),
    "stage3_autocast": (3, 3, AUTOCAST | WARMUP, {"sub_group_size": 20}),
    "stage3_bf16": (2, 3, BF16, {"sub_group_size": 50}),
    "stage3_fp16": (2, 3, FP16, {}),
}


def train_and_save(rank, world_size, port, name):
    _, stage, config, zero = CASES[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but it computes
    model = build()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(param_groups(model)),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage} | zero} | config,
    )
    for step in range(NUM_STEPS):
        engine.backward(engine(batch(step * world_size + rank)))
        engine.step()
    engine.save_checkpoint(str(HERE / name), client_state={"epoch": 1, "note": "of the client"})
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links after the first group's first step, when the second group has no state yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected = {}
    for fqn, parameter in model.named_parameters():
        if stage > 0 and parameter.requires_grad:
            expected[f"fp32/{fqn}"] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq") if engine.global_steps > engine.skipped_steps else ():
                expected[f"{key}/{fqn}"] = safe_get_full_optimizer_state(parameter, key)
    if rank == 0:
        tensors = {key: value.detach().clone().contiguous() for key, value in expected.items()}
        if stage > 0 and name != "stage1_bf16":  # zero_to_fp32 knows no checkpoint of BF16_Optimizer
            converted = get_fp32_state_dict_from_zero_checkpoint(str(HERE / name))
            for key in (key for key in tensors if key.startswith("fp32/")):
                torch.testing.assert_close(converted[key.removeprefix("fp32/")], tensors[key], rtol=0, atol=0)
        save_file(tensors, str(HERE / name / "expected.safetensors"))
        facts = {
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "lr": engine.get_lr(),
            "loss_scale": float(getattr(engine.optimizer, "loss_scale", 1)),
        }
        (HERE / name / "expected.json").write_text(json.dumps(facts) + "\n")
        for script in (HERE / name).glob("zero_to_*.py"):
            script.unlink()
    dist.barrier()
    dist.destroy_process_group()


def main(names):
    for name in names or CASES:
        shutil.rmtree(HERE / name, ignore_errors=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world_size = CASES[name][0]
        mp.spawn(train_and_save, (world_size, port, name), nprocs=world_size)


if __name__ == "__main__":
    main(sys.argv[1:])
