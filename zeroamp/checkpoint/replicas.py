"""Compares the replicas of sharded tensors before a save, which stores only one replica of each shard.

At stage 0 and with HSDP, several ranks hold the same shard. torch.distributed.checkpoint writes parts of a tensor from
different replicas, so replicas that have diverged would be saved as a mixture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.model_state import MODEL
from zeroamp.hooks._torch.dtensor import split_dim
from zeroamp.planning.mesh import local_part, replicate_size
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.policies.dtypes import INTEGER_BY_NUM_BYTES
from zeroamp.policies.errors import CheckpointError
from zeroamp.rank_group import RankGroup
from zeroamp.wrapping.state import wrap_state

_CHUNK = 2**22
_FACTOR = 6364136223846793005  # odd, so that no chunk's sum is lost modulo 2^64


@dataclass(frozen=True, slots=True)
class ShardSums:
    """Checksums of this rank's shards of all tensors that are sharded over the same axes of a mesh."""

    axes: tuple[str, ...]
    """Names of the axes, or numbers if the mesh has no names."""
    number: int
    """Index of this rank's shards among those of all ranks."""
    sums: dict[str, int] = field(default_factory=dict)
    """Tensor name -> checksum of this rank's shard."""


def checksums(tensors: Mapping[str, torch.Tensor], axes: MeshAxes) -> list[ShardSums]:
    """Return checksums of this rank's shards of DTensors; [] if no other rank holds the same shards.

    Waits for the device. Reads each shard once, with 64 MiB of temporary memory at most.
    """
    if axes.is_plain and replicate_size(axes.fsdp) == 1:
        return []
    found: dict[tuple[str, ...], ShardSums] = {}
    sums = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            place = _place_of(tensor)
            sums[name] = checksum(local_part(tensor)), found.setdefault(place.axes, place)
    for name, (total, place) in sums.items():
        place.sums[name] = int(total)
    return [found[key] for key in sorted(found)]


def _place_of(tensor: DTensor) -> ShardSums:
    """Return the axes and the index of this rank's shard of a tensor, without checksums."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    number, axes = 0, []
    for axis, placement in enumerate(tensor.placements):
        if split_dim(placement) is not None:
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
            axes.append(names[axis])
    return ShardSums(tuple(axes), number)


@torch.no_grad()
def checksum(tensor: torch.Tensor, *, chunk: int = _CHUNK) -> torch.Tensor:
    """Return a checksum that depends on every bit of a tensor and on the order of its elements: 0-D int64.

    Modulo 2^64, for each chunk c: total = total x factor + sum over i of bits(c[i]) x (2i + 1). For a tensor subclass
    with inner tensors, it is the sum of their checksums.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return torch.stack([checksum(getattr(tensor, name), chunk=chunk) for name in names]).sum()
    bits = tensor.detach().contiguous().reshape(-1).view(INTEGER_BY_NUM_BYTES[tensor.dtype.itemsize])
    weights = 2 * torch.arange(min(chunk, bits.numel()), device=bits.device) + 1  # int64
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(chunk):  # type: ignore[no-untyped-call]
        total = total * _FACTOR + (part * weights[: part.numel()]).sum()
    return total


def refuse_different_replicas(own: list[ShardSums], ranks: RankGroup) -> None:
    """Raise CheckpointError if two ranks that hold the same shard have different checksums of it. All ranks call this.

    Args:
        own: the result of `checksums` on this rank.
        ranks: all ranks of the model.
    """
    if not own:
        return
    of_ranks = ranks.run(lambda: own)
    by_shard: dict[tuple[str, tuple[str, ...], int], dict[int, int]] = {}  # -> rank -> checksum
    for rank, found in zip(ranks.ranks, of_ranks, strict=True):
        for each in found:
            for name, total in each.sums.items():
                by_shard.setdefault((name, each.axes, each.number), {})[rank] = total
    for (name, _, _), sums in by_shard.items():
        first = next(iter(sums.values()))
        if others := [rank for rank, total in sums.items() if total != first]:
            raise CheckpointError(
                f"{name} must be the same on ranks {', '.join(map(str, sums))}, which are replicas, but "
                f"differs on {', '.join(map(str, others))}. A rank was updated outside of TrainStep, or with "
                "other settings. Load the last checkpoint."
            )


def refuse_different_scalars(differing: Sequence[str], root: nn.Module) -> None:
    """Raise CheckpointError if a 0-D parameter, which every rank holds whole, is among the tensors that differ.

    Parameters of `ignored_params` may differ.
    """
    ignored = wrap_state(root).plan.ignored_fqns
    scalars = {MODEL + fqn for fqn, parameter in root.named_parameters() if parameter.dim() == 0 and fqn not in ignored}
    name = next((name for name in differing if name in scalars), None)
    if name is not None:
        raise CheckpointError(
            f"{name} must be the same on all ranks, but differs. A rank was updated outside of TrainStep, or with "
            "other settings. Load the last checkpoint."
        )
