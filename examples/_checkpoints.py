"""Going on from a checkpoint: the state of training, the run so far, and the position in the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from _output import Run

import zeroamp

CHECKPOINTS = "checkpoints"  # the folder in --out


def resume(model: torch.nn.Module, train: zeroamp.TrainStep, asked: str | None, checkpoints: Path) -> Run | None:
    """Load what --resume asks for: nothing, the newest of `checkpoints` if there is one ("auto"), or a path.

    Returns the run as it was then; None for a new one.
    """
    if asked is None:
        return None
    is_auto = asked == "auto"
    folder = checkpoints if is_auto else Path(asked)
    # The first rank's: only its clock is kept, and the number of ranks may change.
    extra = zeroamp.load_checkpoint(folder, model, train, missing_ok=is_auto, extra_rank=0)
    return None if extra is None else Run(**extra)


def skip(batches: Iterator[torch.Tensor], num_tokens: int, *, num_tokens_per_batch: int) -> None:
    """Pass over the micro-batches that hold the `num_tokens` (over all ranks) that were trained on before."""
    for _ in range(num_tokens // num_tokens_per_batch):
        next(batches)
