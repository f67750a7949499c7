"""Resumes from a checkpoint: the state of training, the run so far, and changes by another number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from _output import Run

import zeroamp

CHECKPOINTS = "checkpoints"  # the folder in --out
BATCH = "train_batch_size"


def resume(model: torch.nn.Module, train: zeroamp.TrainStep, asked: str | None, checkpoints: Path) -> Run | None:
    """Load the checkpoint of --resume: none, the newest of `checkpoints` if there is one ("auto"), or a path.

    Returns the run as it was saved; None for a new run.
    """
    if asked is None:
        return None
    is_auto = asked == "auto"
    folder = checkpoints if is_auto else Path(asked)
    # extra_rank=0: only the first rank's clock is used, and the number of ranks may change.
    extra = zeroamp.load_checkpoint(folder, model, train, missing_ok=is_auto, extra_rank=0)
    return None if extra is None else Run(**extra)


def batch_sizes(*, ranks: int, micro_batch_size: int, accumulation: int) -> dict[str, int]:
    """Return the ranks and batch sizes, under the names of the config."""
    return {
        "ranks": ranks,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        BATCH: ranks * micro_batch_size * accumulation,
    }


def note_change(run: Run, sizes: dict[str, int]) -> str | None:
    """Set the batch sizes of a resumed run. Return a line about what changed, which the run stores too, or None."""
    before, run.batch_sizes, run.world_size = run.batch_sizes, sizes, sizes["ranks"]
    changes = [f"{name} {before[name]} -> {size}" for name, size in sizes.items() if before.get(name, size) != size]
    if not changes:
        return None
    if before[BATCH] == sizes[BATCH]:
        changes.append(f"{BATCH} is still {sizes[BATCH]}")
    else:
        changes.append(f"set {BATCH} in the config to keep it")
    run.changes.append(f"after step {len(run.losses)}: {', '.join(changes)}")
    return run.changes[-1]
