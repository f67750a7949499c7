"""Raises an error for optimizers that a mesh with a tensor or expert axis does not support."""

import torch

from zeroamp.policies.errors import StepError
from zeroamp.training.optimizer_kinds import full_name, kind_of


def refuse_on_two_axes(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
    """Raise StepError for an optimizer that is not updated on shards, with tensor or expert parallelism."""
    if kind_of(optimizer, on_shards=on_shards) != "shards":
        raise StepError(
            f"TrainStep was given {full_name(optimizer)}, which is not updated on plain shards. With tensor or expert "
            "parallelism that is not supported, because parameters are DTensors on meshes of one axis and of two. "
            "Use torch.optim.AdamW or another of docs/optimizers.md that is updated on shards, or pass on_shards=True "
            "if the optimizer is element-wise."
        )
