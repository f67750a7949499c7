"""The interface of all engines: a model of its own, and a function that takes one optimizer step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.peers.model import SHAPES, Decoder, build
from benchmarks.peers.options import Options

LEARNING_RATE = 1e-3


class UnavailableError(Exception):
    """An engine cannot run here. The text has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The options, device and data of all engines."""

    options: Options
    device: torch.device
    micro_batches: tuple[torch.Tensor, ...]
    """This rank's tokens: int64 [batch, length] each, the same in every step."""

    def model(self) -> Decoder:
        """Return a new model: the same weights on all ranks and for all engines."""
        return build(
            SHAPES[self.options.model],
            self.options.length,
            self.device,
            checkpointing=self.options.checkpointing,
            compiled=self.options.compile,
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW: fused on an accelerator, torch's default on a CPU."""
        fused = True if self.device.type == "cuda" else None
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)

    def autocast(self) -> AbstractContextManager[None]:
        """Return torch.autocast in bfloat16, for peers that leave it to their user."""
        return torch.autocast(self.device.type, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An engine that is ready to train."""

    step: Callable[[], torch.Tensor]
    """Takes one optimizer step and returns the mean loss of its micro-batches: 0-D, detached, before the update."""
    own_count: Callable[[], Mapping[Any, tuple[int, int]]] | None = None
    """(calls, bytes) per (collective, dtype) since the start, as the engine itself counts them."""


def setup(options: Options, device: torch.device, rank: int) -> Setup:
    """Return the setup of a rank, whose tokens differ from the other ranks'."""
    generator = torch.Generator().manual_seed(1 + rank)
    size = (options.micro_batches, options.batch, options.length)
    tokens = torch.randint(0, SHAPES[options.model].vocab, size, generator=generator).to(device)
    return Setup(options=options, device=device, micro_batches=tuple(tokens))


def mean(losses: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean of detached losses, without waiting for any."""
    return torch.stack([loss.detach().float() for loss in losses]).mean()
