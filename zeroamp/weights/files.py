"""The safetensors files that transformers and peft read: writes them, and opens them for reading.

model.safetensors                     all tensors; or, for a large model:
model-00001-of-00003.safetensors …    some of the tensors each
model.safetensors.index.json          the file of every tensor
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.untrusted_files import is_file_name, leads_out, open_regular, read_json

MANIFEST = "zeroamp.json"
"""A folder with this file is a checkpoint. Exports refuse to write into it."""
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MODEL_STEM, ADAPTER_STEM = "model", "adapter_model"
"""The beginnings of the file names of a model, and of a peft adapter."""


def require_libraries() -> None:
    """Raise CheckpointError if safetensors or huggingface_hub is not installed. Training needs neither."""
    try:
        import huggingface_hub  # noqa: F401
        import safetensors.torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise CheckpointError(f"The package {error.name} is not installed. Run: pip install 'zeroamp[hf]'") from error


def write_weights(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    write_config: Callable[[Path], None],
    max_shard_bytes: int,
    stem: str = MODEL_STEM,
) -> Iterator[bool]:
    """Write tensors to `folder`, one file after another. One rank iterates over this.

    All files, and those that `write_config` writes, are written into a folder inside `folder` first. Then they replace
    the weights of an earlier export; other files stay. Yields True after each file, so that other ranks need not wait
    longer than the writing of one file. The tensors must be contiguous and on the CPU.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    if (folder / MANIFEST).exists():
        raise CheckpointError(f"Cannot export into {folder}: it is a checkpoint. Pass another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{stem}{{suffix}}.safetensors"
    plan = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern, max_shard_size=max_shard_bytes)
    with TemporaryDirectory(prefix=".export-", dir=folder) as name:
        draft = Path(name)
        write_config(draft)
        for file, names in plan.filename_to_tensors.items():
            save_file({name: tensors[name] for name in names}, draft / file, metadata={"format": "pt"})
            # safetensors creates files that only their owner can read.
            (draft / file).chmod(folder.stat().st_mode & 0o666)
            yield True
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (draft / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        of_export = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
        for path in folder.iterdir():
            if of_export.fullmatch(path.name):
                path.unlink()
        # Readers open JSON files first. They are moved last, so a reader that finds them finds all files.
        for path in sorted(draft.iterdir(), key=lambda path: path.suffix == ".json"):
            path.replace(folder / path.name)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in an open safetensors file."""

    name: str
    file: Any
    """The open file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return `part` of the tensor, with a slice for each dimension, or the whole tensor for None, on the CPU."""
        tensor: torch.Tensor = self.file.get_tensor(self.name) if part is None else self.file.get_slice(self.name)[part]
        return tensor


def stored_tensors(folder: Path, stack: ExitStack) -> dict[str, Stored]:
    """Return the tensors of a model's files by name. The files stay open until `stack` ends.

    Raises:
        CheckpointError: there are no files, or a file cannot be read, or lacks a tensor that the index lists.
    """
    index, single = folder / INDEX, folder / SINGLE_FILE
    if not index.exists():
        if not single.exists():
            raise CheckpointError(_no_files(folder))
        return tensors_of_file(single, stack)
    file_of = _read_index(index)
    held = {file: tensors_of_file(folder / file, stack) for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in held[file]:
            raise CheckpointError(f"{folder / file} must have {name}, which {INDEX} lists. Get the files again.")
    return {name: held[file][name] for name, file in file_of.items()}


def _no_files(folder: Path) -> str:
    needed = f"{folder} must be a folder with {SINGLE_FILE}, or with {INDEX} and its files"
    if pickle := next(folder.glob("pytorch_model*.bin*"), None):
        return (
            f"{needed}, but has {pickle.name}. A pickle may run any code: convert it once, with transformers' "
            "from_pretrained and save_pretrained."
        )
    return (
        f"{needed}, but {'has neither' if folder.is_dir() else 'is not a folder'}. Pass the folder of the weights. "
        "Download those of a hub first (huggingface_hub.snapshot_download)."
    )


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name of an index file. All files are in the index's own folder."""
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


def tensors_of_file(path: Path, stack: ExitStack) -> dict[str, Stored]:
    """Return the tensors of one safetensors file by name. The file stays open until `stack` ends.

    Raises:
        CheckpointError: the file cannot be read, or is a link out of its folder. Links into a hub's cache are followed.
    """
    require_libraries()
    from safetensors import SafetensorError, safe_open

    snapshots = path.parent.resolve().parent  # in a hub's cache: REPO/snapshots/REVISION/NAME links into REPO/blobs
    if leads_out(path, *[snapshots.parent / "blobs"] * (snapshots.name == "snapshots")):
        raise CheckpointError(
            f"{path} must be a file in its folder, but is a link to {path.resolve()}. Copy the file into the "
            "folder, or pass the folder that has it."
        )
    try:
        open_regular(path).close()
        file = stack.enter_context(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file ({type(error).__name__}: {error}). Get the file again."
        ) from error
    return {name: Stored(name, file) for name in file.keys()}  # noqa: SIM118  # it is no dict
