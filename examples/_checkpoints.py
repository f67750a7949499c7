"""Resumes from a checkpoint: the state of training, the run so far, and changes by another number of ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _output import Run

import zeroamp

CHECKPOINTS = "checkpoints"  # the folder in --out
BATCH = "train_batch_size"


class StopSignal(zeroamp.Callback):
    """Whether any rank received SIGTERM: one number in the all-reduce of each step, so the same on all ranks."""

    def __init__(self) -> None:
        self.was_received = self.is_requested = False  # on this rank, on any rank
        # Python allows signal handlers in the main thread only. Ray trains in another thread.
        self.has_handler = threading.current_thread() is threading.main_thread()
        if self.has_handler:
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.was_received = True

    def statistics(self) -> tuple[Sequence[float], Callable[[Sequence[float]], None]]:
        """Return this rank's number, and what gets the sum over all ranks."""
        return [float(self.was_received)], self._read_sum

    def _read_sum(self, sums: Sequence[float]) -> None:
        self.is_requested = sums[0] > 0

    def close(self) -> None:
        """Let SIGTERM end the process again."""
        if self.has_handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
        changes.append(f"--train-batch-size {before[BATCH]} keeps it")
    run.changes.append(f"after step {len(run.losses)}: {', '.join(changes)}")
    return run.changes[-1]
