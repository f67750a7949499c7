"""Locates the elements of each parameter in DeepSpeed's flat partitions.

    stages 1, 2   one flat vector per param group: its parameters in order, each followed by its alignment padding, then
                  zeros. Each rank holds one stretch of it. A parameter may lie in several stretches.
    stage 3       one flat vector per sub-group and rank: the rank's part of each parameter in order. A part has
                  ceil(numel / ranks) elements on every rank; those of the last ranks are padded.

Parameters are identified by their order only: a file lists the names in each vector, in order, with their shapes.
Master weights and state tensors of the optimizer have the same layout.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from zeroamp.deepspeed.files import unreadable
from zeroamp.hooks._torch.dtensor import split_dim
from zeroamp.planning.mesh import local_part, local_slices

Shapes = dict[str, tuple[int, ...]]
"""Name -> shape, in the order of a flat vector."""
Flats = list[list[torch.Tensor]]
"""flats[rank][group]: 1-D, mapped from the rank's file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Elements `begin` to `end` of a flattened parameter start at index `start` in the flat vector of `rank`."""

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
        """Return the parameter's tensor, from each rank's part of its flat vector."""
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
    """A tensor of a checkpoint, in consecutive pieces. Its file is not read before a copy."""

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
        """Fill the 1-D `target` with the elements from `begin` on. Only these are read."""
        self.copy_runs(target.view(1, -1), begin, max(1, target.numel()))

    def copy_runs(self, target: torch.Tensor, begin: int, stride: int) -> None:
        """Fill `target` with runs of consecutive elements. Only these are read.

        Args:
            target: a view of shape [runs, length] of the tensor to fill.
            begin: index of the first run's first element in the flattened stored tensor.
            stride: elements from the start of a run to the start of the next, at least `length`.
        """
        num_runs, length = target.shape
        if target.numel() == 0:
            return
        for piece in self.pieces:
            # The runs [first, last) lie entirely in the piece: one strided copy.
            first = max(0, -((begin - piece.begin) // stride))
            last = min(num_runs, (piece.end - begin - length) // stride + 1)
            if first < last:
                values = piece.values[begin + first * stride - piece.begin :]
                target[first:last].copy_(values.unfold(0, length, stride)[: last - first])
            # The piece may begin and end inside runs. Other pieces have the rest of these runs.
            for run in {(piece.begin - begin) // stride, (piece.end - 1 - begin) // stride}:
                start = begin + run * stride
                low, high = max(start, piece.begin), min(start + length, piece.end)
                if 0 <= run < num_runs and not first <= run < last and low < high:
                    values = piece.values[low - piece.begin : high - piece.begin]
                    target[run, low - start : high - start].copy_(values)


def whole(tensor: torch.Tensor) -> StoredTensor:
    """Return a `StoredTensor` for a tensor that a file holds in one piece."""
    return StoredTensor(tuple(tensor.shape), (Piece(0, tensor.numel(), flattened(tensor)),))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, 1-D.

    Raises:
        CheckpointError: the storage has fewer elements than the tensor, as after `expand`. Its size in memory would be
            unbounded.
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
        paddings: number of zeros after each parameter, per group. None: no padding.
        flats: the master weights. Those of the last ranks may lack their padding.

    Raises:
        CheckpointError: the vectors are shorter than the parameters, or longer than with padding.
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
    """Place the parameters of stage 3. `groups`: the shapes of each sub-group, in the order of its flat vectors.

    Raises:
        CheckpointError: a rank's vector is longer or shorter than its parts of the parameters.
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
    """Copy this rank's part of a stored tensor into `target`, a DTensor or a whole tensor. Only this part is read."""
    local, shape = local_part(target.detach()), target.shape
    dim, begin, length = _shard_range(target) if isinstance(target, DTensor) else (0, 0, math.prod(shape[:1]))
    inner = math.prod(shape[dim + 1 :])
    runs = math.prod(shape[:dim]), length * inner
    with torch.no_grad():
        if local.is_contiguous():
            stored.copy_runs(local.view(runs), begin * inner, math.prod(shape[dim:]))
        else:
            values = torch.empty(runs, dtype=local.dtype, device=local.device)
            stored.copy_runs(values, begin * inner, math.prod(shape[dim:]))
            local.copy_(values.view(local.shape))


def _shard_range(tensor: DTensor) -> tuple[int, int, int]:
    """Return the sharded dimension, and this rank's first index and length in it."""
    slices = local_slices(tensor)
    dim = next((dim for placement in tensor.placements if (dim := split_dim(placement)) is not None), 0)
    return dim, slices[dim].start, slices[dim].stop - slices[dim].start
