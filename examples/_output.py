"""What the fine-tuning example shows while it runs and leaves behind: a progress bar, the losses, a plot."""

from __future__ import annotations

import json
import math
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

GIB = 1024**3


@dataclass(kw_only=True)
class Run:
    """The numbers of one run. Lists have one entry per optimizer step; losses are nats per predicted token."""

    args: dict[str, str]
    world_size: int
    held_out_before: float = float("nan")
    held_out_after: float = float("nan")
    losses: list[float] = field(default_factory=list)
    """Means over all micro-batches and ranks."""
    grad_norms: list[float] = field(default_factory=list)
    """Before clipping."""
    num_tokens: list[int] = field(default_factory=list)
    """Trained on, over all ranks."""
    seconds: list[float] = field(default_factory=list)

    def add(self, *, loss: float, grad_norm: float, num_tokens: int, seconds: float) -> None:
        """Record one optimizer step."""
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.num_tokens.append(num_tokens)
        self.seconds.append(seconds)

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks and all steps so far."""
        return sum(self.num_tokens) / sum(self.seconds)

    def write(self, path: Path) -> None:
        """Write all fields as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


class Progress:
    """A tqdm bar where stdout is a terminal, else about twenty plain lines, which a log file can hold."""

    def __init__(self, *, num_steps: int, num_done: int, device: torch.device, is_shown: bool) -> None:
        self._num_steps = num_steps
        self._device = device
        self._is_shown = is_shown
        self._is_bar = is_shown and sys.stdout.isatty()
        self._lines_every = math.ceil(num_steps / 20)
        self._bar = tqdm(total=num_steps, initial=num_done, unit="step", file=sys.stdout, disable=not self._is_bar)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, run: Run) -> None:
        """Show the step that was added to `run` last."""
        if not self._is_shown:
            return
        step = len(run.losses)
        words = f"loss {run.losses[-1]:.4f}, {run.tokens_per_second:,.0f} tokens/s, {memory(self._device)}"
        if self._is_bar:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
        elif step == 1 or step % self._lines_every == 0 or step == self._num_steps:
            print(f"step {step}/{self._num_steps}: {words}", flush=True)


def memory(device: torch.device) -> str:
    """The peak so far of this rank, in words: allocated on its GPU, or resident in its process (RSS) on the CPU."""
    if device.type == "cuda":
        return f"peak {torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB on the GPU"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_bytes = peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux, bytes on macOS
    return f"peak RSS {num_bytes / GIB:.2f} GiB"


def plot_losses(run: Run, path: Path) -> None:
    """Draw the training loss per optimizer step and the two held-out losses, as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")  # without pyplot, so no display is looked for
    axes = figure.subplots()
    num_steps = len(run.losses)
    axes.plot(range(1, num_steps + 1), run.losses, label="training, mean of all ranks")
    axes.plot([0, num_steps], [run.held_out_before, run.held_out_after], "o", label="held out, before and after")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=run.args["model"])
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
