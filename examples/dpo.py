"""Direct preference optimization with TRL's DPOTrainer on zeroamp. Model and reference model are both sharded.

    torchrun --nproc-per-node 2 examples/dpo.py

A tiny random model learns to prefer right sums to wrong ones. With `peft_config` no reference model is needed: the
model without its adapters is the reference.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.distributed as dist
from _weights import load_model
from datasets import Dataset

from zeroamp.integrations.trl import ZeroampDPOConfig, ZeroampDPOTrainer

CONFIG = {
    "zero_optimization": {"stage": 3},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "gradient_clipping": "auto",  # max_grad_norm
}


def main(arguments: list[str] | None = None) -> None:
    """Train, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--out", type=Path, default=Path("runs/dpo"), help="folder of the model")
    options = parser.parse_args(arguments)
    model, tokenizer = load_model("tiny", seed=0)
    args = ZeroampDPOConfig(
        zeroamp=CONFIG,
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ZeroampDPOTrainer(
        model,
        ref_model=copy.deepcopy(model),  # frozen and wrapped by the trainer
        args=args,
        train_dataset=preferences(),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()  # for `from_pretrained`
    if trainer.is_world_process_zero():
        log = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
        first, last = (entry["rewards/margins"] for entry in (log[0], log[-1]))
        print(f"margin of rewards: first {first:.4f} -> last {last:.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def preferences() -> Dataset:
    """Sums with a right and a wrong answer."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{a} plus {b} is ", "chosen": f"{a + b}.", "rejected": f"{a * b + 20}!"} for a, b in pairs]
    return Dataset.from_list(rows)


if __name__ == "__main__":
    main()
