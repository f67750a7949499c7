"""Train a tiny LLaMA with accelerate's loop on zeroamp. Only the class of the accelerator changes.

    torchrun --nproc-per-node 2 examples/accelerate_llama.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_llama.py --config config.json

`--accelerator stock` runs the same loop with accelerate's DDP in bf16: at stages 0 and 1 of `CONFIG` the losses are the
same, bit for bit. At the end it loads the last state again, and writes `model/` for `from_pretrained`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

CONFIG = {
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "zero_optimization": {"stage": 3},
    "gradient_accumulation_steps": "auto",
    "communication_data_type": "fp32",
}
VOCABULARY, LENGTH = 64, 16


def main(arguments: list[str] | None = None) -> None:
    """Train, resume, evaluate and save."""
    args = parse_arguments(arguments)
    accelerator = make_accelerator(args)
    set_seed(0)
    model = LlamaForCausalLM(tiny_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # prepare replaces its parameters by the shards
    loader = DataLoader(sequences(args.examples), batch_size=4, shuffle=True)
    held_out = DataLoader(sequences(16, first=args.examples), batch_size=4)
    steps = args.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=steps)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    for epoch in range(args.epochs):
        for batch in loader:  # the last optimizer step of an epoch may have fewer micro-batches
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_norm:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        loss = evaluate(accelerator, model, held_out)
        accelerator.print(f"epoch {epoch}: held-out loss {loss!r}, learning rate {scheduler.get_last_lr()[0]:.2e}")
        accelerator.save_state()
    accelerator.wait_for_everyone()  # accelerate's own state is written by the first rank alone
    accelerator.load_state()
    if evaluate(accelerator, model, held_out) != loss:
        raise SystemExit("expected the held-out loss of the saved state, got another one")
    state = accelerator.get_state_dict(model)  # whole, on the first rank
    accelerator.unwrap_model(model).save_pretrained(
        args.out / "model", is_main_process=accelerator.is_main_process, state_dict=state
    )
    accelerator.print(f"wrote {args.out / 'model'}")
    accelerator.end_training()


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """Return accelerate's accelerator, or zeroamp's."""
    project = ProjectConfiguration(project_dir=str(args.out), automatic_checkpoint_naming=True, total_limit=1)
    is_cpu = not torch.cuda.is_available()
    common = {"cpu": is_cpu, "project_config": project, "gradient_accumulation_steps": args.grad_accum}
    if args.accelerator == "stock":
        return Accelerator(mixed_precision="bf16", **common)
    from zeroamp.integrations.accelerate import ZeroampAccelerator

    return ZeroampAccelerator(zeroamp=args.config or CONFIG, **common)


def tiny_llama() -> LlamaConfig:
    """Return the config of a LLaMA of two layers."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip


def sequences(number: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return arithmetic progressions modulo the vocabulary, each with its own start and difference."""
    rows = [
        (17 * i % VOCABULARY + torch.arange(LENGTH) * (1 + i % 7)) % VOCABULARY for i in range(first, first + number)
    ]
    return [{"input_ids": row, "labels": row} for row in rows]


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the mean loss of the batches of all ranks."""
    model.eval()
    losses = [accelerator.gather_for_metrics(model(**batch).loss.repeat(len(batch["labels"]))) for batch in loader]
    model.train()
    return torch.cat(losses).mean().item()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["zeroamp", "stock"], default="zeroamp")
    parser.add_argument("--config", type=Path, help="a DeepSpeed-style config; by default stage 3, autocast in bf16")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--examples", type=int, default=72, help="sequences of an epoch")
    parser.add_argument("--grad-accum", type=int, default=2, help="micro-batches of an optimizer step")
    parser.add_argument("--max-norm", type=float, default=0.0, help="clip gradients to this norm; 0 does not clip")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "zeroamp_accelerate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
