"""Reads the tensors of a checkpoint, and its files of `torch.save`, without running code from them.

A read follows the layout in the manifest. All files are read by `torch.load(weights_only=True)`.
"""

import pickle
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.manifest import Chunk, Layout, removed
from zeroamp.hooks._torch.file_parts import part_of_file
from zeroamp.planning.mesh import local_part, local_slices
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.untrusted_files import open_regular

Block = tuple[slice, ...]
"""One slice per dimension."""


def read_values(path: Path) -> Any:
    """Return the content of one of a checkpoint's own files of `torch.save`: tensors on the CPU, plain values.

    Raises:
        CheckpointError: the file cannot be read, or it names classes or functions other than those of tensors.
    """
    try:
        with open_regular(path) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's text explains how to switch the check off
        raise CheckpointError(
            f"{path} is not read, because it refers to {', '.join(unsafe_names(path)) or 'more'} besides tensors "
            "and plain values. Reading it could run any code. If you trust its author, allow these names around "
            "the call with torch.serialization.safe_globals([...])."
        ) from error
    except Exception as error:  # a damaged file may make torch raise anything
        raise removed(path.parent) or CheckpointError(
            f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {error}). Copy it again, or "
            "load another checkpoint."
        ) from error


def read_tensors(tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], folder: Path) -> None:
    """Read this rank's part of every tensor, in place, from the chunks that have elements of it.

    Raises:
        CheckpointError: a chunk is not what its layout says.
    """
    by_file: dict[str, list[tuple[Chunk, torch.dtype, torch.Tensor, Block]]] = defaultdict(list)
    for name, tensor in tensors.items():
        local, block = local_part(tensor.detach()), _block(tensor)
        for chunk in layouts[name].chunks:
            here, there = _common(block, chunk)
            if all(part.start < part.stop for part in there):
                by_file[chunk.file].append((chunk, layouts[name].torch_dtype, local[here], there))
    for name, parts in by_file.items():
        try:
            with open_regular(folder / name) as file:
                for chunk, dtype, target, there in parts:
                    target.copy_(_read_chunk(file, chunk, dtype)[there])
        except Exception as error:  # a damaged file may make torch raise anything
            # torch's text of an UnpicklingError begins with how to switch the check off.
            text = str(error).rpartition("WeightsUnpickler error: ")[2]
            raise removed(folder) or CheckpointError(
                f"The tensors in {folder / name} cannot be read ({type(error).__name__}: {text}). Load another "
                "checkpoint."
            ) from error


def _block(tensor: torch.Tensor) -> Block:
    """Return which block of the whole tensor this rank has."""
    return local_slices(tensor) if isinstance(tensor, DTensor) else tuple(slice(0, length) for length in tensor.shape)


def _common(block: Block, chunk: Chunk) -> tuple[Block, Block]:
    """Return the common block of a rank's block and a chunk, as slices of the first and of the second."""
    here, there = [], []
    for own, start, length in zip(block, chunk.offsets, chunk.shape, strict=True):
        first, last = max(own.start, start), min(own.stop, start + length)
        here.append(slice(first - own.start, last - own.start))
        there.append(slice(first - start, last - start))
    return tuple(here), tuple(there)


def _read_chunk(file: IO[bytes], chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a chunk, on the CPU."""
    part = part_of_file(file, chunk.start, chunk.num_bytes)
    values = torch.load(part, map_location="cpu", weights_only=True)
    if type(values) is not torch.Tensor or values.dtype != dtype or tuple(values.shape) != chunk.shape:
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"expected a tensor {dtype} {list(chunk.shape)} at byte {chunk.start}, found {found}")
    return values


def unsafe_names(file: Path | IO[bytes]) -> list[str]:
    """Return the classes and functions that a file of `torch.save` names, except those of tensors; [] if unreadable."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # a damaged file may make torch raise anything
        return []
