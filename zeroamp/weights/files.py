"""The safetensors files that transformers and peft read: writes them, and opens them for reading.

model.safetensors                     all tensors; or, for a large model:
model-00001-of-00003.safetensors …    some of the tensors each
model.safetensors.index.json          the file of every tensor
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroamp.policies.errors import CheckpointError
from zeroamp.policies.json_values import once_each
from zeroamp.weights.drafts import sync_to_disk
from zeroamp.weights.replacement import MANIFEST as MANIFEST
from zeroamp.weights.replacement import export_id, open_draft, replace_weights, weight_files
from zeroamp.weights.untrusted_files import is_file_name, leads_out, open_regular, read_regular

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EXPORT_ID = "zeroamp_export"
"""Key of an export's id, in the metadata of its index and of its files."""
OF_SEVERAL = (
    "must list files of one export, but they are of several: another export has replaced them, or they were copied "
    "there one by one. Load again; if that does not help, get the files again."
)
_MAX_INDEX_BYTES = 32 * 1024**2
"""32 MiB: three times the size of an index of 100,000 tensors."""
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

    All files, and those that `write_config` writes, replace the weights of an earlier export when they are complete:
    see `replace_weights`. Other files stay. Yields True after each file, so that other ranks need not wait longer than
    the writing of one file. The tensors must be contiguous and on the CPU.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    with open_draft(folder) as draft:
        split = partial(split_torch_state_dict_into_shards, dict(tensors), max_shard_size=max_shard_bytes)
        plan = split(filename_pattern=f"{stem}{{suffix}}.safetensors")
        if plan.is_sharded and weight_files(folder, stem):
            plan = split(filename_pattern=f"{stem}-{export_id(draft)}{{suffix}}.safetensors")
        write_config(draft)
        for file, names in plan.filename_to_tensors.items():
            # One file alone cannot be mixed with those of another export, and has the same bytes in each run.
            export = {EXPORT_ID: export_id(draft)} if plan.is_sharded else {}
            save_file({name: tensors[name] for name in names}, draft / file, metadata={"format": "pt", **export})
            # safetensors creates files that only their owner can read.
            (draft / file).chmod(folder.stat().st_mode & 0o666)
            sync_to_disk(draft / file)
            yield True
        if plan.is_sharded:
            index = {"metadata": {**plan.metadata, EXPORT_ID: export_id(draft)}, "weight_map": plan.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (draft / f"{stem}.safetensors.index.json").write_text(text)
        replace_weights(draft, folder, stem)


_INTEGERS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_DTYPES = {**_INTEGERS, **_FLOATS, **_FLOAT8, "BOOL": torch.bool, "C64": torch.complex64}
"""Name in a safetensors file -> dtype."""


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

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype in the file. None: one that zeroamp does not read."""
        return _DTYPES.get(self.file.get_slice(self.name).get_dtype())

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
    if single.exists():  # transformers prefers it too
        return tensors_of_file(single, stack)
    if not index.exists():
        raise CheckpointError(_no_files(folder))
    file_of, exports = _read_index(index)
    held = {file: tensors_of_file(folder / file, stack) for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in held[file]:
            raise CheckpointError(f"{folder / file} must have {name}, which {INDEX} lists. Get the files again.")
    stored = {name: held[file][name] for name, file in file_of.items()}
    if len(exports | exports_of(stored)) > 1:
        raise CheckpointError(f"{folder}: {INDEX} {OF_SEVERAL}")
    return stored


def exports_of(stored: Mapping[str, Stored]) -> set[str | None]:
    """Return the ids of the exports that wrote the files of tensors. None is that of other files."""
    files = {id(each.file): each.file for each in stored.values()}
    return {(file.metadata() or {}).get(EXPORT_ID) for file in files.values()}


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


def _read_index(path: Path) -> tuple[dict[str, str], set[str | None]]:
    """Return tensor name -> file name of an index file, and the id of its export, if it has one.

    All files are in the index's own folder.
    """
    try:
        content = json.loads(read_regular(path, _MAX_INDEX_BYTES).decode(), object_pairs_hook=once_each)
        weight_map: dict[str, str] = dict(content["weight_map"].items())
        exports = {id for key, id in content.get("metadata", {}).items() if key == EXPORT_ID}
        if outside := next((name for name in weight_map.values() if not is_file_name(name)), None):
            raise ValueError(f"{outside!a} is not the name of a file in its folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f'{path} must be an index, {{"weight_map": {{tensor: file}}}}, but cannot be read '
            f"({type(error).__name__}: {error}). Get the file again."
        ) from error
    return weight_map, exports


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
    except (OSError, SafetensorError, RuntimeError) as error:  # torch's, if an export has just removed the file
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file ({type(error).__name__}: {error}). Get the file again."
        ) from error
    return {name: Stored(name, file) for name in file.keys()}  # noqa: SIM118  # it is no dict
