"""A LLaMA with Lightning Fabric: python examples/fabric_llama.py --devices 2, or torchrun --nproc-per-node 2 ...

A tiny model learns to count. The loop is the usual loop of Fabric; the strategy shards with zeroamp.
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from transformers import LlamaConfig, LlamaForCausalLM

import zeroamp
from zeroamp.integrations.lightning import FabricZeroampStrategy


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, save, load and generate; return the losses."""
    args = parse_arguments(arguments)
    strategy = FabricZeroampStrategy({"zero_optimization": {"stage": args.stage}, "gradient_clipping": 1.0})
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy=strategy, precision="bf16-mixed")
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
    with fabric.init_module(empty_init=True):  # on the meta device: no rank holds the whole model
        model = LlamaForCausalLM(config)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=args.lr))
    if fabric.is_global_zero:
        print(zeroamp.explain(model))
    rows = (torch.arange(64)[:, None] + torch.arange(32)) % 16  # [sequences, tokens]: counting
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=4))
    losses, step = [], 0
    while step < args.steps:
        for index, tokens in enumerate(loader):
            is_last = (index + 1) % args.accumulate == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                fabric.backward(loss / args.accumulate)
            if not is_last:
                continue
            optimizer.step()  # clips by the config's gradient_clipping
            optimizer.zero_grad()
            step += 1
            losses.append(strategy.report.loss)  # the mean over ranks
            fabric.print(f"step {step}: loss {strategy.report.loss:.3f}, gradient norm {strategy.report.grad_norm:.3f}")
            if step == args.steps:
                break
    fabric.save(args.out, {"model": model, "optimizer": optimizer, "step": step})
    fabric.load(args.out, {"model": model, "optimizer": optimizer})
    model.eval()
    model.mark_forward_method("generate")  # as with DDP: `generate` then runs inside of the wrapped model's forward
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
    add("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--lr", type=float, default=1e-2)
    add("--out", type=Path, default=Path("runs/fabric_llama"), help="folder of the checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
