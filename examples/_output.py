"""Output of the fine-tuning example: the losses, and a plot of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from matplotlib.figure import Figure


@dataclass(kw_only=True)
class Run:
    """The numbers of one run. Lists have one entry per optimizer step; losses are nats per predicted token."""

    args: dict[str, str]
    world_size: int
    """Number of ranks of the last start."""
    batch_sizes: dict[str, int] = field(default_factory=dict)
    """Batch sizes and ranks of the last start, under the names of the config."""
    changes: list[str] = field(default_factory=list)
    """One line per start with other batch sizes or ranks: what changed."""
    held_out_before: float = float("nan")
    held_out_after: float = float("nan")
    losses: list[float] = field(default_factory=list)
    """Means over all micro-batches and ranks."""
    grad_norms: list[float] = field(default_factory=list)
    """Before clipping."""
    num_tokens: list[int] = field(default_factory=list)
    """Tokens trained on, over all ranks."""
    seconds: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out loss) of --eval-every."""
    answers: list[str] = field(default_factory=list)
    """Answers to --generate: before and after training."""

    def add(self, *, loss: float, grad_norm: float, num_tokens: int, seconds: float) -> None:
        """Record one optimizer step."""
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.num_tokens.append(num_tokens)
        self.seconds.append(seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks and all steps so far."""
        return sum(self.num_tokens) / sum(self.seconds)

    def write(self, path: Path) -> None:
        """Write all fields as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def wandb_log(project: str | None, run: Run, name: str) -> Callable[..., None]:
    """Return what logs numbers of a step to Weights & Biases; without a project, what does nothing."""
    if project is None:
        return lambda *_, **__: None
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise SystemExit("--wandb needs the package wandb: pip install wandb") from error
    # A resumed run goes on in the same plots.
    return wandb.init(project=project, name=name, id=name, resume="allow", config=run.args).log


def plot_losses(run: Run, path: Path) -> None:
    """Draw the training loss per optimizer step and the two held-out losses, as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")  # without pyplot, which would look for a display
    axes = figure.subplots()
    num_steps = len(run.losses)
    axes.plot(range(1, num_steps + 1), run.losses, label="training, mean of all ranks")
    held_out = [(0, run.held_out_before), *map(tuple, run.evaluations), (num_steps, run.held_out_after)]
    axes.plot(*zip(*held_out, strict=True), "o-", label="held out")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=run.args["model"])
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
