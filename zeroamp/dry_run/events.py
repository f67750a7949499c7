"""What a traced micro-batch consists of: changes of memory, ops, and the points at which FSDP2 acts."""

from dataclasses import dataclass, field
from typing import Literal

from zeroamp.planning.replay import Replay

Kind = Literal["activations", "workspace", "unsharded gradients"]
"""Activations are made in the forward and outlive it; the workspace is all else that is neither that nor a gradient."""

ACTIVATIONS: Kind = "activations"
WORKSPACE: Kind = "workspace"
UNSHARDED_GRADIENTS: Kind = "unsharded gradients"

Point = Literal["begin forward", "end forward", "begin backward", "end backward"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A unit begins or ends its forward or backward there; "" is the root."""

    point: Point
    unit: str


@dataclass(slots=True)
class Change:
    """A storage is allocated (bytes above 0) or freed (below 0)."""

    num_bytes: int
    kind: Kind = WORKSPACE
    param: str = ""
    """Of a gradient: the FQN of its parameter."""
    unit: str = field(default="", compare=False)
    """The unit whose forward was running."""


@dataclass(frozen=True, slots=True)
class GradientReady:
    """Autograd has added a gradient of so many bytes to what its parameter has."""

    param: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """What an op computes and moves."""

    flops: int
    """Of a matrix product, a convolution or an attention; 0 for all else."""
    is_low: bool
    """Whether it computes in 16 bits."""
    num_bytes: int
    """Of the tensors that it reads and writes, each once."""


Event = Mark | Change | GradientReady | Op


MAX_MICRO_BATCHES = 3
"""Of more micro-batches in an optimizer step the first, one from the middle and the last are replayed: those in between
are alike."""


def drive(replay: Replay, mark: Mark, *, is_last: bool) -> None:
    """Let the replay do what FSDP2 does at a mark; `is_last` is that of the micro-batch."""
    if mark.point == "begin forward":
        replay.begin_forward(mark.unit)
    elif mark.point == "end forward":
        replay.end_forward(mark.unit)
    elif mark.point == "begin backward":
        replay.begin_backward(mark.unit)
    else:
        replay.end_backward(mark.unit, is_last=is_last)
