"""A LLaMA with Lightning Fabric: python examples/fabric_llama.py --devices 2, or torchrun --nproc-per-node 2 ...

A tiny model learns to count. Fabric launches the ranks and deals the batches.
zeroamp shards, trains and saves the model.
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from transformers import LlamaConfig, LlamaForCausalLM

import zeroamp


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, save, load and generate; return the losses."""
    args = parse_arguments(arguments)
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy="ddp")  # it launches; no DDP is made
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    with torch.device("meta"):  # no rank holds the whole model
        model = LlamaForCausalLM(config)
    policy = zeroamp.policy_from_config(
        {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {"stage": args.stage},
            "gradient_accumulation_steps": args.grad_accum,
            "gradient_clipping": 1.0,
        }
    )
    zeroamp.wrap_model(model, policy)  # in place of fabric.setup
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=args.lr))
    fabric.print(zeroamp.explain(model).summary())
    rows = (torch.arange(64)[:, None] + torch.arange(32)) % 16  # [sequences, tokens]: counting
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=4))
    losses: list[float] = []
    while len(losses) < args.steps:
        for tokens in loader:
            train.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
            if report := train.step():  # None before the last micro-batch of an optimizer step
                losses.append(report.loss)  # the mean over ranks
                fabric.print(f"step {report.step}: loss {report.loss:.3f}, gradient norm {report.grad_norm:.3f}")
            if len(losses) == args.steps:
                break
    zeroamp.save_checkpoint(args.out, model, train)
    zeroamp.load_checkpoint(args.out, model, train)
    model.eval()
    zeroamp.register_forward_method(model, "generate")  # `generate` then runs inside of the wrapped model's forward
    with torch.no_grad():
        generated = model.generate(input_ids=rows[:1, :8].to(fabric.device), max_new_tokens=8, do_sample=False)
    fabric.print("generated", generated[0, 8:].tolist())
    return losses


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--accelerator", default="auto")
    add("--devices", type=int, default=2)
    add("--stage", type=int, default=3, help="ZeRO stage")
    add("--steps", type=int, default=10, help="optimizer steps")
    add("--grad-accum", type=int, default=1, help="micro-batches per optimizer step")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--lr", type=float, default=1e-2)
    add("--out", type=Path, default=Path("runs/fabric_llama"), help="folder of the checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
