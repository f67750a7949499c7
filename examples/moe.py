"""A mixture of experts under autocast, with grouped products in bf16: a tiny Mixtral, ZeRO-3.

    torchrun --nproc-per-node 2 examples/moe.py

`torch.autocast` does not cast grouped products, so experts would run and be all-gathered in fp32. The override
all-gathers their weights in bf16, in which transformers then multiplies (docs/moe.md).
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from _launch import start_process_group
from transformers import MixtralConfig, MixtralForCausalLM

import zeroamp

CONFIG = {
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "zeroamp": {"overrides": [{"modules": ["*.experts.gate_up_proj", "*.experts.down_proj"], "param": "bf16"}]},
}


def main(arguments: list[str] | None = None) -> None:
    """Train on rows of rising numbers, and print the ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    options = parser.parse_args(arguments)
    device = start_process_group()
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)  # the same weights on every rank
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,  # the loss that balances the experts
    )
    model = zeroamp.wrap_model(MixtralForCausalLM(config), zeroamp.policy_from_config(CONFIG))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    if is_first:
        print(zeroamp.explain(model))
    for step in range(options.steps):
        batch = rows(step * dist.get_world_size() + dist.get_rank(), device)
        train.backward(model(**batch).loss)
        if (report := train.step()) and is_first:
            print(f"step {step + 1}: loss {report.loss:.3f}, gradient norm {report.grad_norm:.3f}", flush=True)
    dist.destroy_process_group()


def rows(seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows of numbers that rise by a step of their own: [8, 32] tokens."""
    generator = torch.Generator().manual_seed(seed)
    first, step = torch.randint(0, 64, (8, 1), generator=generator), torch.randint(1, 4, (8, 1), generator=generator)
    tokens = (first + step * torch.arange(32)).remainder(64).to(device)
    return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    main()
