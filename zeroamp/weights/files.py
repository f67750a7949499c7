"""The safetensors files that transformers reads: which tensor is in which file, writing them, and replacing old ones.

model.safetensors                     all tensors, or else
model-00001-of-00003.safetensors …    some of them each, and
model.safetensors.index.json          the file of every tensor
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.policies.files import is_file_name, read_json
from zeroamp.policies.numbers import is_integer
from zeroamp.weights.drafts import WRITER, sync_to_disk, write_durably

MANIFEST = "zeroamp.json"
"""A folder with this file is a checkpoint: no export is written into one."""
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MODEL_STEM, ADAPTER_STEM = "model", "adapter_model"
"""What the names of the files of a model, of an adapter of peft, begin with."""
_FILE_NAME = re.compile(rf"({MODEL_STEM}|{ADAPTER_STEM})(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """One file and the tensors in it, in order."""

    name: str
    tensors: tuple[TensorSpec, ...] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values of all its tensors, without the header."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def plan_files(specs: Iterable[TensorSpec], max_bytes: int, stem: str = MODEL_STEM) -> tuple[WeightFile, ...]:
    """Divide tensors into files of at most `max_bytes` each, in order; a larger tensor has a file of its own.

    It uses shapes and dtypes alone: no tensor is read. The names of the files begin with `stem`.

    Raises:
        CheckpointError: `max_bytes` is not an integer from 1 on.
    """
    if not is_integer(max_bytes, at_least=1):
        valid = "a number of bytes, an integer from 1 on"
        raise CheckpointError(describe("max_shard_bytes", repr(max_bytes), valid, "Leave it out for 5 GB."))
    contents: list[list[TensorSpec]] = [[]]
    free = max_bytes
    for spec in specs:
        if contents[-1] and spec.num_bytes > free:
            contents.append([])
            free = max_bytes
        contents[-1].append(spec)
        free -= spec.num_bytes
    if len(contents) == 1:
        return (WeightFile(name=f"{stem}.safetensors", tensors=tuple(contents[0])),)
    return tuple(
        WeightFile(name=f"{stem}-{number:05}-of-{len(contents):05}.safetensors", tensors=tuple(tensors))
        for number, tensors in enumerate(contents, start=1)
    )


def write_files(
    files: Sequence[WeightFile], read: Callable[[TensorSpec], torch.Tensor], folder: Path, mine: int = 0
) -> None:
    """Read the tensors of `files` one by one, in order, and write the file of number `mine` to `folder`.

    Where several ranks write, `files` has one for each, and `read` is a collective that every rank calls for every
    tensor. A rank holds at most its own file and one tensor.

    Args:
        files: from `plan_files`, not all of them necessarily.
        read: returns a tensor of the spec's shape and dtype, on any device.
        folder: exists.
        mine: the number of a file in `files`; `len(files)` or above writes nothing.
    """
    retained: dict[str, torch.Tensor] = {}
    for number, file in enumerate(files):
        for spec in file.tensors:
            tensor = read(spec)
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise AssertionError(f"expected {spec}, got {tuple(tensor.shape)} of {tensor.dtype}")
            if number == mine:
                retained[spec.name] = tensor.cpu()
            del tensor  # before the next one is read
    if mine < len(files):
        path = folder / files[mine].name
        safetensors_torch().save_file(retained, path, metadata={"format": "pt"})
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it readable by its owner only
        sync_to_disk(path)


def write_index(files: Sequence[WeightFile], folder: Path) -> None:
    """Write the index of several files; a single file has none."""
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(file.num_bytes for file in files)},
        "weight_map": {spec.name: file.name for file in files for spec in file.tensors},
    }
    write_durably(folder / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def publish(draft: Path, folder: Path, stem: str = MODEL_STEM) -> None:
    """Move the files of a draft to their place.

    A folder that does not exist yet is made by one rename. In one that exists, the weights of an earlier export are
    removed before the new ones are moved, so that a crash never leaves a mixture of both. Other files stay. When this
    returns, all is on the disk.

    Args:
        draft: complete; inside `folder` where that exists, else beside it, on the same file system.
        folder: a folder, or nothing yet.
        stem: what the names of the weights' files begin with.

    Raises:
        CheckpointError: a file could not be moved; the text names the folder of the others.
    """
    writer = draft / WRITER
    try:
        sync_to_disk(draft)
        if draft.parent != folder:
            writer.unlink(missing_ok=True)
            draft.rename(folder)
        else:
            for path in folder.iterdir():
                if (match := _FILE_NAME.fullmatch(path.name)) and match[1] == stem:
                    path.unlink()
            for path in sorted(draft.iterdir(), key=_place):
                if path != writer:
                    os.replace(path, folder / path.name)
            writer.unlink(missing_ok=True)
            draft.rmdir()
            sync_to_disk(folder)
        sync_to_disk(folder.parent)
    except OSError as error:
        with suppress(OSError):
            writer.unlink()  # so that no later export removes the draft
        raise CheckpointError(
            f"The export could not be moved into {folder}: {error}. The other files are in {str(draft)!r}: move them."
        ) from error


def _place(path: Path) -> tuple[bool, bool, str]:
    # Readers begin with config.json, then look for the index: what is found is complete.
    return path.name in ("config.json", "adapter_config.json"), path.name == INDEX, path.name


def safetensors_torch() -> ModuleType:
    """Import safetensors.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import safetensors.torch  # an extra: training needs none
    except ModuleNotFoundError as error:
        raise CheckpointError("The package safetensors is not installed. Run: pip install zeroamp[hf]") from error
    return safetensors.torch


def read_index(path: Path) -> dict[str, str]:
    """Return the file of every tensor in an index file: names of files in the index's own folder.

    Raises:
        CheckpointError: the file cannot be read as an index.
    """
    try:
        weight_map: dict[str, str] = dict(read_json(path)["weight_map"].items())
        if outside := next((name for name in weight_map.values() if not is_file_name(name)), None):
            raise ValueError(f"{outside!a} is not the name of a file in its folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f'{path} must be an index, {{"weight_map": {{tensor: file}}}}, but cannot be read '
            f"({type(error).__name__}: {error}). Get the file again."
        ) from error
    return weight_map
