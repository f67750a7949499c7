"""Group relative policy optimization with TRL's GRPOTrainer on zeroamp, and the gap to an inference engine.

    torchrun --nproc-per-node 2 examples/grpo.py

A tiny random model learns to answer in digits. Then its weights are streamed into a copy in bf16, as into an inference
engine, and the log-probabilities of both are compared: with the engine's output head in bf16, and in fp32 as in the
training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from _weights import load_model
from datasets import Dataset
from torch import nn
from trl import GRPOConfig, GRPOTrainer

import zeroamp
from zeroamp.integrations.trl import ZeroampMixin

CONFIG = {
    "zero_optimization": {"stage": 3},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "data_types": {"keep_in_fp32_modules": ["@lm_head"]},
}


class ZeroampGRPOTrainer(ZeroampMixin, GRPOTrainer):
    """TRL's GRPOTrainer on zeroamp."""


def main(arguments: list[str] | None = None) -> None:
    """Train, and compare the model with its copy in bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"), help="folder of the trainer")
    options = parser.parse_args(arguments)
    model, tokenizer = load_model("tiny", seed=0)
    args = GRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=12,
        learning_rate=3e-3,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    prompts = Dataset.from_list([{"prompt": f"{a} plus {b} is "} for a in range(10) for b in range(10)])
    trainer = ZeroampGRPOTrainer(
        model, args=args, train_dataset=prompts, reward_funcs=digits, processing_class=tokenizer, zeroamp=CONFIG
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    tokens = tokenizer("7 plus 8 is 15. 2 plus 3 is 5.", return_tensors="pt")["input_ids"].to(trainer.args.device)
    with torch.no_grad():
        trained = log_probabilities(trainer.model, tokens)
        engine = inference_copy(trainer.model, trainer.args.device)
        gaps = {"bf16": gap(engine, tokens, trained), "fp32": gap(with_fp32_head(engine), tokens, trained)}
    if trainer.is_world_process_zero():
        third = max(1, len(rewards) // 3)
        first, last = (sum(part) / third for part in (rewards[:third], rewards[-third:]))
        print(f"reward: first {first:.3f} -> last {last:.3f}", flush=True)
        for head, value in gaps.items():
            print(f"head of the engine in {head}: mean gap of log-probabilities {value:.5f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def digits(completions: list[str], **_: object) -> list[float]:
    """Return the share of digits in each completion."""
    return [sum(each.isdigit() for each in text) / max(1, len(text)) for text in completions]


def inference_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model in bf16 with the weights of a wrapped one. Every rank calls it."""
    engine, _ = load_model("tiny", seed=1)
    engine.to(device, torch.bfloat16)
    state = engine.state_dict()
    for name, tensor in zeroamp.iter_weights(model, torch.bfloat16):
        state[name].copy_(tensor)
    return engine.eval()


def with_fp32_head(engine: nn.Module) -> nn.Module:
    """Let the engine's output head compute in fp32, as `zeroamp.inference_dtypes` returns for the training."""
    head = engine.get_output_embeddings()  # its weight, which the embedding shares, stays in bf16
    head.register_forward_hook(lambda _, inputs, __: nn.functional.linear(inputs[0].float(), head.weight.float()))
    return engine


def log_probabilities(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token after the first, in fp32: [1, tokens - 1]."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def gap(engine: nn.Module, tokens: torch.Tensor, trained: torch.Tensor) -> float:
    """Return the mean absolute difference of the log-probabilities of the engine and of the trained model."""
    return float((log_probabilities(engine, tokens) - trained).abs().mean())


if __name__ == "__main__":
    main()
