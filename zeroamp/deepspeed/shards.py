"""From the tensors of a checkpoint to the shards of a wrapped model: which goes where, and this rank's part of it."""

import math
from collections.abc import Container, Iterable

import torch
from torch.distributed.tensor import DTensor, Shard

from zeroamp.deepspeed.contents import Contents
from zeroamp.deepspeed.layout import StoredTensor, whole
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.weights.model_weights import Weight

_NUM_NAMES = 8  # that an error lists of each kind


def sources_of(weights: list[Weight], contents: Contents) -> list[tuple[torch.Tensor, StoredTensor]]:
    """Return every parameter and persistent buffer of the model with its tensor in the checkpoint.

    Raises:
        CheckpointError: some are missing, unexpected, of another shape, or of a dtype that would lose bits.
    """
    stored = contents.parameters | {name: whole(buffer) for name, buffer in contents.buffers.items()}
    found = [(weight, find(weight.names, contents.aliases, stored)) for weight in weights]
    pairs = [(weight, names[0], stored[names[0]]) for weight, names in found if names]
    _refuse(
        {
            "missing": [weight.names[0] for weight, names in found if not names],
            "unexpected": sorted(stored.keys() - {name for _, names in found for name in names}),
            "stored apart, but shared in the model": [" and ".join(names) for _, names in found if len(names) > 1],
            "of another shape": [
                f"{name} {source.shape} for {tuple(weight.tensor.shape)}"
                for weight, name, source in pairs
                if source.shape != tuple(weight.tensor.shape)
            ],
            "of a dtype that would lose bits": [
                f"{name} {source.dtype} for {weight.tensor.dtype}"
                for weight, name, source in pairs
                if weight.is_parameter and source.numel and not _holds(weight.tensor.dtype, source.dtype)
            ],
        }
    )
    return [(weight.tensor, source) for weight, _, source in pairs]


def _holds(dtype: torch.dtype, values: torch.dtype) -> bool:
    return torch.promote_types(dtype, values) == dtype


def find(names: Iterable[str], aliases: dict[str, str], stored: Container[str]) -> list[str]:
    """Return the names under which a parameter of the given names is stored."""
    candidates = [name if name in stored else aliases.get(name, name) for name in names]
    return [name for name in dict.fromkeys(candidates) if name in stored]


def _refuse(problems: dict[str, list[str]]) -> None:
    texts = [
        f"{len(names)} {kind}: {', '.join(names[:_NUM_NAMES])}{', …' if len(names) > _NUM_NAMES else ''}"
        for kind, names in problems.items()
        if names
    ]
    if texts:
        raise CheckpointError(
            describe(
                "the checkpoint's parameters and buffers",
                "; ".join(texts),
                "those of the model, each once",
                "Build the model that was trained, with the same parameters shared; save without "
                "exclude_frozen_parameters.",
            )
        )


def fill(target: torch.Tensor, stored: StoredTensor) -> None:
    """Copy this rank's part of a stored tensor into `target`, a DTensor or a whole tensor. Nothing else is read."""
    local, begin = local_part(target)
    with torch.no_grad():
        if local.is_contiguous():
            stored.copy_to(local.view(-1), begin)
        else:
            values = torch.empty(local.numel(), dtype=local.dtype, device=local.device)
            stored.copy_to(values, begin)
            local.copy_(values.view(local.shape))


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's shard and the number of elements of the flattened tensor before it.

    FSDP2 shards dim 0 in chunks of ceil(rows / ranks) rows, the last ones shorter or empty.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    with torch.no_grad():
        local, row = tensor.to_local(), 0
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            chunk = math.ceil(tensor.shape[0] / tensor.device_mesh.size(axis))
            row = min(chunk * tensor.device_mesh.get_local_rank(axis), tensor.shape[0])
            expected = min(chunk, tensor.shape[0] - row)
            if placement.dim != 0 or local.shape[0] != expected:
                raise AssertionError(f"expected {expected} rows of dim 0, got {tuple(local.shape)} by {placement}")
    return local, row * math.prod(tensor.shape[1:])
