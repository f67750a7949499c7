"""From the tensors of a checkpoint to the shards of a wrapped model: which goes where, and this rank's part of it."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from zeroamp.deepspeed.contents import Contents
from zeroamp.deepspeed.layout import StoredTensor, whole
from zeroamp.policies.errors import CheckpointError, describe

_NUM_NAMES = 8  # that an error lists of each kind


def sources_of(root: nn.Module, contents: Contents) -> list[tuple[torch.Tensor, StoredTensor]]:
    """Return every parameter and persistent buffer of the model with its tensor in the checkpoint.

    Raises:
        CheckpointError: some are missing, unexpected, of another shape, or of a dtype that would lose bits.
    """
    names = names_of(root)
    owners: dict[int, torch.Tensor] = {id(parameter): parameter for parameter in root.parameters()}
    found = {key: find(names[key], contents.aliases, contents.parameters) for key in owners}
    buffers = _persistent_buffers(root)
    problems = {
        "missing": [names[key][0] for key, stored in found.items() if not stored]
        + [name for name in buffers if name not in contents.buffers],
        "unexpected": sorted(set(contents.parameters) - {name for stored in found.values() for name in stored})
        + sorted(set(contents.buffers) - set(buffers)),
        "stored apart, but shared in the model": [" and ".join(stored) for stored in found.values() if len(stored) > 1],
    }
    pairs = [(owners[key], stored[0], contents.parameters[stored[0]]) for key, stored in found.items() if stored]
    pairs += [(buffers[name], name, whole(contents.buffers[name])) for name in buffers if name in contents.buffers]
    problems["of another shape"] = [
        f"{name} {stored.shape} for {tuple(target.shape)}"
        for target, name, stored in pairs
        if stored.shape != tuple(target.shape)
    ]
    problems["of a dtype that would lose bits"] = [
        f"{name} {stored.dtype} for {target.dtype}"
        for target, name, stored in pairs
        if isinstance(target, nn.Parameter)
        and stored.numel
        and torch.promote_types(stored.dtype, target.dtype) != target.dtype
    ]
    _refuse(problems)
    return [(target, stored) for target, _, stored in pairs]


def names_of(root: nn.Module) -> dict[int, list[str]]:
    """Return id of parameter -> all its names, shared ones having several."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def find(names: Iterable[str], aliases: dict[str, str], stored: Iterable[str]) -> list[str]:
    """Return the names under which a parameter of the given names is stored."""
    known = set(stored)
    candidates = [name if name in known else aliases.get(name, name) for name in names]
    return [name for name in dict.fromkeys(candidates) if name in known]


def _persistent_buffers(root: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name for name, value in root.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: buffer for name, buffer in root.named_buffers(remove_duplicate=False) if name in tensors}


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
