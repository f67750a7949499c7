"""The safetensors files that transformers reads: plans, writes and publishes them, and reads their index.

model.safetensors                     all tensors; or, for a large model:
model-00001-of-00003.safetensors …    some of the tensors each
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
from zeroamp.policies.numbers import is_integer
from zeroamp.weights.drafts import WRITER, sync_to_disk, write_durably
from zeroamp.weights.untrusted_files import is_file_name, read_json

MANIFEST = "zeroamp.json"
"""A folder with this file is a checkpoint. Exports refuse to write into it."""
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MODEL_STEM, ADAPTER_STEM = "model", "adapter_model"
"""The beginnings of the file names of a model, and of a peft adapter."""
_FILE_NAME = re.compile(rf"({MODEL_STEM}|{ADAPTER_STEM})(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor's values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """One file, and the tensors in it in their order."""

    name: str
    tensors: tuple[TensorSpec, ...] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors' values, without the header."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def plan_files(specs: Iterable[TensorSpec], max_bytes: int, stem: str = MODEL_STEM) -> tuple[WeightFile, ...]:
    """Divide tensors, in order, into files of at most `max_bytes` each. A larger tensor gets its own file.

    Uses only shapes and dtypes: no tensor is read. The names of the files begin with `stem`.

    Raises:
        CheckpointError: `max_bytes` is not an integer >= 1.
    """
    if not is_integer(max_bytes, at_least=1):
        valid = "a number of bytes, an integer >= 1"
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
    """Read the tensors of `files` one by one, in order, and write the file `files[mine]` to `folder`.

    If several ranks write, `files` has one file for each, and `read` is a collective that every rank calls for every
    tensor. A rank holds at most its own file and one tensor.

    Args:
        files: some of the files that `plan_files` returned.
        read: returns a tensor of the spec's shape and dtype, on any device.
        folder: a folder that exists.
        mine: index of this rank's file in `files`. With `len(files)` or above, this rank writes nothing.
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
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only their owner can read
        sync_to_disk(path)


def write_index(files: Sequence[WeightFile], folder: Path) -> None:
    """Write the index of several files to `folder`. A single file needs no index."""
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(file.num_bytes for file in files)},
        "weight_map": {spec.name: file.name for file in files for spec in file.tensors},
    }
    write_durably(folder / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def publish(draft: Path, folder: Path, stem: str = MODEL_STEM) -> None:
    """Move the files of a draft to `folder`.

    If `folder` does not exist, the draft is renamed to it. If it exists, the weights of an earlier export are removed
    before the new ones are moved, so that a crash never leaves a mixture of both. Other files stay. When this returns,
    everything is on the disk.

    Args:
        draft: a complete draft: inside `folder` if that exists, else beside it, on the same file system.
        folder: the target. It may not exist yet.
        stem: the beginning of the names of the weights' files.

    Raises:
        CheckpointError: a file could not be moved. The text names the folder of the remaining files.
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
            f"The export could not be moved into {folder}: {error}. The remaining files are in {str(draft)!r}: move "
            "them."
        ) from error


def _place(path: Path) -> tuple[bool, bool, str]:
    # Readers open config.json first, then the index. Both are moved last, so a reader that finds them finds all files.
    return path.name in ("config.json", "adapter_config.json"), path.name == INDEX, path.name


def safetensors_torch() -> ModuleType:
    """Import and return `safetensors.torch`.

    Raises:
        CheckpointError: safetensors is not installed.
    """
    try:
        import safetensors.torch  # an optional dependency, which training does not need
    except ModuleNotFoundError as error:
        raise CheckpointError("The package safetensors is not installed. Run: pip install 'zeroamp[hf]'") from error
    return safetensors.torch


def read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name of an index file. All files are in the index's own folder.

    Raises:
        CheckpointError: the file cannot be read as an index, or names a file outside of its folder.
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
