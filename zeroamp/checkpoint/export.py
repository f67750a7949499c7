"""`export_checkpoint`: writes the weights of a checkpoint as safetensors, in one process, without the model."""

import json
import os
import tempfile
from collections.abc import Container
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zeroamp.checkpoint.folder import find_checkpoints, is_checkpoint
from zeroamp.checkpoint.manifest import Manifest, check_file, rank_file, read_manifest
from zeroamp.checkpoint.model_state import MODEL
from zeroamp.checkpoint.reader import CheckpointReader
from zeroamp.policies.errors import CheckpointError, error_text
from zeroamp.policies.policy import Policy
from zeroamp.policies.schema import known_part, validate
from zeroamp.weights.export import export_dtype, find_adapter, overflow, refuse_overflows, save_config
from zeroamp.weights.files import write_weights
from zeroamp.weights.model_weights import find_weights
from zeroamp.weights.untrusted_files import read_json

WEIGHTS = "weights.json"


def export_files(root: nn.Module, excluded: Container[str] = ()) -> dict[str, bytes]:
    """Return the small files that `export_checkpoint` needs, by name. `excluded` names parameters that are not saved.

    `weights.json` lists for each of the model's tensors its name in the checkpoint, its names in an export, and whether
    it is a parameter. Returns no files if the model's state holds more than parameters and buffers, which safetensors
    cannot hold, or if the model has adapters of peft, which `from_pretrained` cannot load.
    """
    if find_adapter(root) is not None:
        return {}
    try:
        weights = [weight for weight in find_weights(root) if weight.names[0] not in excluded]
    except CheckpointError:
        return {}
    if any(name.rpartition(".")[2] == "_extra_state" for weight in weights for name in weight.names):
        return {}
    saved_as: dict[int, str] = {}  # the checkpoint has a buffer that modules share only once
    names = [
        {
            "saved": saved_as.setdefault(id(weight.tensor), weight.names[0]),
            "written": list(weight.written_names),
            "is_parameter": weight.is_parameter,
        }
        for weight in weights
    ]
    with tempfile.TemporaryDirectory() as folder:
        save_config(root, Path(folder), torch.float32)
        config = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return {**config, WEIGHTS: json.dumps(names, indent=1).encode()}


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5 * 1000**3,
) -> Path:
    """Write the weights of a checkpoint to `folder` as `export_hf` does. Needs no model, no other ranks and no GPU.

    Memory holds all weights in `dtype`. Every file of the checkpoint is first checked against its digest.

    Args:
        checkpoint: a checkpoint of `save_checkpoint`, or a folder of checkpoints, whose newest is exported.
        folder: created if it does not exist. Weights of an earlier export in it are replaced.
        dtype: dtype of parameters, "fp32", "bf16" or "fp16". None: as the checkpoint's config sets it, see `export_hf`.
        max_shard_bytes: the largest number of bytes of tensors in one file.

    Returns:
        The checkpoint that was exported.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, a finite value would be infinite in `dtype`, or the
            folder cannot be written.
    """
    path = Path(checkpoint)
    if not is_checkpoint(path):
        found = find_checkpoints(path)
        if not found:
            raise CheckpointError(f"{path} holds no checkpoint that save_checkpoint wrote. Check the path.")
        path = found[0]
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        check_file(path / name, record)
    try:
        saved = _Saved(path, manifest)
        written = export_dtype(dtype, Policy(validate(known_part(manifest.config))).export_dtype)
        tensors, write_config = saved.tensors(written), partial(saved.write_config, dtype=written)
        for _ in write_weights(tensors, Path(folder), write_config, max_shard_bytes):
            pass
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"Cannot export into {os.fspath(folder)}: {error}. Free some space, or pass another folder."
        ) from error
    except Exception as error:  # readers may raise anything for a crafted file
        raise CheckpointError(f"Cannot export {path}: {error_text(error)}. Export another checkpoint.") from error
    return path


class _Saved:
    """The tensors of one checkpoint."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        if WEIGHTS not in manifest.files:
            raise CheckpointError(
                f"{path} has no {WEIGHTS}, because the model's state held more than parameters and buffers, which "
                "safetensors cannot hold, or adapters of peft, which from_pretrained cannot load. Build the model, "
                "load the checkpoint, and export from there: by zeroamp.integrations.peft.export_adapter, or from the "
                "model's own state_dict()."
            )
        self._path = path
        self._config_names = [name for name in manifest.files if name in ("config.json", "generation_config.json")]
        self._reader = CheckpointReader(path, manifest.files)
        # Of buffers that differ between ranks, the first rank's are exported, as `load_checkpoint` loads them.
        self._own: dict[str, torch.Tensor] = self._reader.read_values(rank_file(0), mmap=True)["tensors"]

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        saved, found = self._reader.read_metadata().state_dict_metadata, {}
        for entry in read_json(self._path / WEIGHTS):
            name = MODEL + entry["saved"]
            form = saved[name]
            if not isinstance(form, TensorStorageMetadata):
                raise AssertionError(f"expected a tensor under {name}, got {form}")
            is_cast = entry["is_parameter"] and form.properties.dtype.is_floating_point
            for written in entry["written"]:
                found[written] = self._read(name, written, form, dtype if is_cast else form.properties.dtype)
        return found

    def _read(self, name: str, written: str, saved: TensorStorageMetadata, dtype: torch.dtype) -> torch.Tensor:
        if name in self._own:
            return self._own[name].to(dtype, copy=True)  # it may be written under two names
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        self._reader.read_tensors({name: tensor})
        largest = overflow(tensor, dtype)
        refuse_overflows({} if largest is None else {written: largest}, dtype)
        return tensor.to(dtype)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        for name in self._config_names:
            config = read_json(self._path / name)
            if name == "config.json":
                config["dtype"] = str(dtype).removeprefix("torch.")
            (folder / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
