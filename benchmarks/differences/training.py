"""The training of one rank. A kind of difference changes a part of it on the last rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from zeroamp.policies.json_values import nest

VOCAB, WIDTH, NUM_STEPS = 64, 16, 2
BASE: dict[str, Any] = {"torch_autocast.enabled": True, "torch_autocast.dtype": "bfloat16", "gradient_clipping": 1.0}


class Layers(nn.Module):
    """An embedding, layers of equal shapes, and a loss. `skipped` leaves out one layer."""

    def __init__(self, depth: int = 3, *, tied: bool = False, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), activation(), nn.Dropout(0.0))
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.skipped = -1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of int64 tokens, each predicted from itself."""
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if index != self.skipped:
                x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


@dataclass
class Run:
    """The objects that a kind may change at a step."""

    train: "zeroamp.TrainStep"
    model: Any
    batch: Callable[[], torch.Tensor]


def one_backward(run: Run) -> None:
    """Run an optimizer step of one micro-batch."""
    run.train.backward(run.model(run.batch()))
    run.train.step()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of difference. Its fields apply to the last rank; the other ranks have the defaults."""

    error: str | None
    """Class of the error that all ranks should raise. None: the difference is harmless, and training ends."""
    names: str = ""
    """Text that the error on all ranks should contain."""
    stages: Sequence[int] = (3,)
    base: dict[str, Any] = field(default_factory=dict)
    """Keys of all ranks' config."""
    config: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Layers
    prepare: Callable[[nn.Module], None] | None = None
    """Changes the model before it is wrapped."""
    seed: int = 0
    wrap: Callable[[], dict[str, Any]] = dict
    """More arguments of wrap_model."""
    optimizer: Callable[[nn.Module], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    all_schedule: bool = False
    """Whether the other ranks have a scheduler too."""
    step: Callable[[Run], None] | None = None
    """Runs the second optimizer step instead of `one_backward`."""
    all_step: Callable[[Run], None] = one_backward
    """The same for the other ranks."""


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **more})


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def train(kind: Kind, stage: int) -> int:
    """Train on this rank, with the difference if it is the last rank. Return the number of optimizer steps taken."""
    differs = dist.get_rank() == dist.get_world_size() - 1
    keys = {**BASE, "zero_optimization.stage": stage, **kind.base, **(kind.config if differs else {})}
    policy = zeroamp.policy_from_config(nest(keys))
    torch.manual_seed(kind.seed if differs else 0)
    model = kind.model() if differs else Layers()
    if differs and kind.prepare is not None:
        kind.prepare(model)
    arguments = {"auto_wrap_policy": {"Sequential"}, **(kind.wrap() if differs else {})}
    model = zeroamp.wrap_model(model, policy, **arguments)
    optimizer = (kind.optimizer or adamw)(model) if differs else adamw(model)
    schedules = kind.scheduler if differs else (lambda_lr if kind.all_schedule else None)
    step = zeroamp.TrainStep(model, optimizer, schedules(optimizer) if schedules else None)
    torch.manual_seed(1 + dist.get_rank())
    run = Run(step, model, lambda: torch.randint(0, VOCAB, (2, 8)))
    for index in range(NUM_STEPS):
        if index == 1:
            (kind.step or kind.all_step if differs else kind.all_step)(run)
        else:
            for _ in range(policy.gradient_accumulation_steps):
                step.backward(model(run.batch()))
                step.step()
    return step.num_steps
