"""Where the elements of each parameter are in DeepSpeed's flat partitions.

    stages 1, 2   per param group one flat vector: its parameters one after the other, each followed by its alignment
                  padding, then zeros. Every rank holds one stretch of it; parameters cross from one to the next.
    stage 3       per sub-group and rank one flat vector: of each parameter in turn the rank's part, which is
                  ceil(numel / ranks) elements long at every rank, the last ones padded.

Only the order identifies the parameters: a file lists the names of each vector, in order, with their shapes. Master
weights and the optimizer's tensors have the same places.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from zeroamp.deepspeed.files import unreadable
from zeroamp.planning.mesh import local_part
from zeroamp.weights.model_weights import first_row

Shapes = dict[str, tuple[int, ...]]
"""Name -> shape, in the order of a flat vector."""
Flats = list[list[torch.Tensor]]
"""flats[rank][group]: 1-D, mapped from the rank's file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Elements `begin` to `end` of a flattened parameter lie from `start` on in the flat vector of `rank`."""

    rank: int
    begin: int
    end: int
    start: int


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """A parameter and the places of its elements."""

    shape: tuple[int, ...]
    group: int
    """The param group at stages 1 and 2, the sub-group at stage 3."""
    places: tuple[Place, ...]

    def take(self, by_rank: Sequence[torch.Tensor]) -> "StoredTensor":
        """Return the parameter's tensor in its flat vector, given as each rank has it."""
        pieces = ((p, by_rank[p.rank][p.start : p.start + p.end - p.begin]) for p in self.places)
        return StoredTensor(self.shape, tuple(Piece(place.begin, place.end, values) for place, values in pieces))


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `begin` to `end` of a flattened tensor: a 1-D view of a mapped file."""

    begin: int
    end: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, in consecutive pieces. Nothing is read until it is copied."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored elements; fp32 for a tensor without elements."""
        return self.pieces[0].values.dtype if self.pieces else torch.float32

    def copy_to(self, target: torch.Tensor, begin: int) -> None:
        """Fill `target`, 1-D, with the elements from `begin` on. Reads no others."""
        end = begin + target.numel()
        for piece in self.pieces:
            low, high = max(begin, piece.begin), min(end, piece.end)
            if low < high:
                values = piece.values[low - piece.begin : high - piece.begin]
                target[low - begin : high - begin].copy_(values)


def whole(tensor: torch.Tensor) -> StoredTensor:
    """Return a tensor that a file holds in one piece."""
    return StoredTensor(tuple(tensor.shape), (Piece(0, tensor.numel(), flattened(tensor)),))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, 1-D.

    Raises:
        CheckpointError: the storage has fewer elements, as after `expand`: a copy would take any amount of memory.
    """
    if tensor.layout != torch.strided or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise unreadable("A tensor", f"one of shape {list(tensor.shape)} by {tensor.layout}", "stored in full")
    return tensor.reshape(-1)


def place_stretches(
    groups: Sequence[Shapes], paddings: list[list[int]] | None, flats: Flats
) -> dict[str, PlacedParameter]:
    """Place the parameters of stages 1 and 2.

    Args:
        groups: the shapes of each param group, in the order of its flat vector.
        paddings: zeros after each parameter, per group; None for none.
        flats: the master weights; the last ranks' may lack their padding.

    Raises:
        CheckpointError: the vectors are shorter than the parameters, or longer than padding explains.
    """
    placed = {}
    for group, shapes in enumerate(groups):
        bounds = [0, *itertools.accumulate(flat[group].numel() for flat in flats)]
        offset = 0
        for (name, shape), padding in zip(
            shapes.items(), paddings[group] if paddings else [0] * len(shapes), strict=True
        ):
            end = offset + math.prod(shape)
            placed[name] = PlacedParameter(shape, group, tuple(_overlaps(offset, end, bounds)))
            offset = end + padding
        # DeepSpeed pads the vector to a multiple of twice the ranks.
        _check_length(f"The flat vector of param group {group}", bounds[-1], offset, offset + 2 * len(flats) - 1)
    return placed


def _overlaps(offset: int, end: int, bounds: list[int]) -> list[Place]:
    stretches = enumerate(itertools.pairwise(bounds))
    overlaps = [(rank, max(offset, low), min(end, high), low) for rank, (low, high) in stretches]
    return [
        Place(rank, begin - offset, stop - offset, begin - low) for rank, begin, stop, low in overlaps if begin < stop
    ]


def place_parts(groups: Sequence[Shapes], flats: Flats) -> dict[str, PlacedParameter]:
    """Place the parameters of stage 3; `groups` are the shapes of each sub-group.

    Raises:
        CheckpointError: a rank's vector is not as long as its parts of the parameters.
    """
    placed = {}
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            part = math.ceil(math.prod(shape) / len(flats))
            placed[name] = PlacedParameter(shape, group, tuple(_parts(math.prod(shape), part, len(flats), offset)))
            offset += part
        for rank, flat in enumerate(flats):
            _check_length(f"The flat vector of sub-group {group} of rank {rank}", flat[group].numel(), offset, offset)
    return placed


def _parts(numel: int, part: int, num_ranks: int, start: int) -> list[Place]:
    ranges = [(rank, rank * part, min(numel, (rank + 1) * part)) for rank in range(num_ranks)]
    return [Place(rank, begin, end, start) for rank, begin, end in ranges if begin < end]


def place_frozen(shape: tuple[int, ...], parts: list[torch.Tensor]) -> StoredTensor:
    """Return a frozen parameter of stage 3 from the parts of all ranks."""
    places = _parts(math.prod(shape), math.ceil(math.prod(shape) / len(parts)), len(parts), 0)
    for place in places:
        needed = place.end - place.begin
        _check_length(f"A frozen parameter at rank {place.rank}", parts[place.rank].numel(), needed, None)
    return StoredTensor(
        shape, tuple(Piece(p.begin, p.end, flattened(parts[p.rank])[: p.end - p.begin]) for p in places)
    )


def _check_length(where: str, numel: int, shortest: int, longest: int | None) -> None:
    if numel < shortest or (longest is not None and numel > longest):
        valid = f"{shortest} or more" if longest is None else " to ".join(map(str, dict.fromkeys((shortest, longest))))
        raise unreadable(where, f"of {numel}", f"of {valid} elements by the shapes of its parameters")


def fill(target: torch.Tensor, stored: StoredTensor) -> None:
    """Copy this rank's part of a stored tensor into `target`, a DTensor or a whole tensor. Reads nothing else."""
    local, begin = local_part(target.detach()), 0
    if isinstance(target, DTensor):
        begin = first_row(target) * math.prod(target.shape[1:])
    with torch.no_grad():
        if local.is_contiguous():
            stored.copy_to(local.view(-1), begin)
        else:
            values = torch.empty(local.numel(), dtype=local.dtype, device=local.device)
            stored.copy_to(values, begin)
            local.copy_(values.view(local.shape))
