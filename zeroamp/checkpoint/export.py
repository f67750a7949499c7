"""`export_checkpoint`: a checkpoint as safetensors, in one process, without the model: one file at a time."""

import json
import logging
import os
import shutil
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from zeroamp.checkpoint.files import rank_file
from zeroamp.checkpoint.folder import find_checkpoints, is_checkpoint
from zeroamp.checkpoint.manifest import Manifest, check_file, read_manifest
from zeroamp.checkpoint.reader import SafeReader
from zeroamp.checkpoint.state import MODEL
from zeroamp.policies import policy_from_config
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.weights.dtype_range import refuse_overflows
from zeroamp.weights.export import export_dtype, refuse_checkpoint, save_config
from zeroamp.weights.files import TensorSpec, plan_files, publish, safetensors_torch, write_files, write_index
from zeroamp.weights.model_weights import find_weights

WEIGHTS = "weights.json"


def export_files(root: nn.Module) -> dict[str, bytes]:
    """Return small files by name.

    `weights.json` says for each of the model's tensors what the checkpoint calls it, under which names it is written,
    and whether it is a parameter. It is missing where the model's state holds more than parameters and buffers, so that
    safetensors could not hold the model.
    """
    try:
        weights = find_weights(root)
    except CheckpointError:
        return {}
    if any(name.rpartition(".")[2] == "_extra_state" for weight in weights for name in weight.names):
        return {}
    saved_as: dict[int, str] = {}  # a buffer that modules share is in the checkpoint once
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


logger = logging.getLogger("zeroamp")


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5 * 1000**3,
) -> Path:
    """Write the weights of a checkpoint to `folder` as `export_hf` does; needs no model, no ranks and no GPU.

    At most the tensors of one file and one tensor in the checkpoint's dtype are in memory. Every file of the checkpoint
    is checked against its digest first.

    Args:
        checkpoint: what `save_checkpoint` wrote, or a folder of such, of which the newest is taken.
        folder: made where there is none; in one that exists, weights of an earlier export are replaced.
        dtype: "fp32", "bf16" or "fp16", of parameters; None: what the checkpoint's config says, see `export_hf`.
        max_shard_bytes: of the tensors of one file.

    Returns:
        The checkpoint that was taken.

    Raises:
        CheckpointError: there is none, it is damaged, a finite value would be infinite in `dtype`, or the folder cannot
            be written.
    """
    path = _find(Path(checkpoint))
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        check_file(path / name, record)
    target = export_dtype(dtype, policy_from_config(manifest.config).export_dtype)
    source = _Source(path, manifest)
    files = plan_files(source.specs(target), max_shard_bytes)
    safetensors_torch()
    out = Path(folder).absolute()
    refuse_checkpoint(out)
    draft = (
        out / f".draft-{uuid.uuid4().hex[:8]}"
        if out.exists()
        else out.with_name(f".{out.name}.draft-{uuid.uuid4().hex[:8]}")
    )
    try:
        draft.mkdir(parents=True)
        source.write_config(draft, target)
        for file in files:
            write_files([file], source.read, draft)
            logger.info("wrote %s: %d tensors, %d bytes", file.name, len(file.tensors), file.num_bytes)
        write_index(files, draft)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(describe(str(out), str(error), "a folder that takes the export", "Make room.")) from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    publish(draft, out)
    return path


def _find(path: Path) -> Path:
    found = path if is_checkpoint(path) else next(iter(find_checkpoints(path)), None)
    if found is None:
        raise CheckpointError(describe(str(path), "no checkpoint", "what save_checkpoint wrote", "Check the path."))
    return found


class _Source:
    """The tensors of one checkpoint."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        if WEIGHTS not in manifest.files:
            found = f"no {WEIGHTS}: the model's state held more than parameters and buffers"
            raise CheckpointError(describe(str(path), found, "a model of these", "safetensors holds nothing else."))
        self._path = path
        self._config_names = [name for name in manifest.files if name in ("config.json", "generation_config.json")]
        self._weights: list[dict[str, Any]] = json.loads((path / WEIGHTS).read_text(encoding="utf-8"))
        self._reader = _CachedReader(path)
        self._saved = {entry["saved"]: self._entry(entry["saved"]) for entry in self._weights}
        self._sources = {written: entry["saved"] for entry in self._weights for written in entry["written"]}
        # Buffers that differ between ranks: the first rank's, as everywhere.
        own = torch.load(path / rank_file(0), map_location="cpu", weights_only=True, mmap=True)
        self._own: dict[str, torch.Tensor] = own["tensors"]

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._reader.read_metadata().state_dict_metadata.get(MODEL + name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(describe(str(self._path), f"no tensor {name}", f"all of {WEIGHTS}", "Save it again."))
        return entry

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Return what is written, in the model's order."""
        return [
            TensorSpec(
                name=written,
                shape=tuple(self._saved[entry["saved"]].size),
                dtype=self._written_dtype(entry, dtype),
            )
            for entry in self._weights
            for written in entry["written"]
        ]

    def _written_dtype(self, entry: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
        saved = self._saved[entry["saved"]].properties.dtype
        return dtype if entry["is_parameter"] and saved.is_floating_point else saved

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """Return one tensor as it is written."""
        name = MODEL + self._sources[spec.name]
        if name in self._own:
            return self._own[name].to(spec.dtype, copy=True)  # it may be written under two names
        saved = self._saved[self._sources[spec.name]]
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        with warnings.catch_warnings():
            # It says that without a process group it loads in one process, which is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load({name: tensor}, storage_reader=self._reader, no_dist=True)
        refuse_overflows({spec.name: tensor}, spec.dtype)
        return tensor.to(spec.dtype)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a transformers model's config with the dtype of its weights."""
        for name in self._config_names:
            config = json.loads((self._path / name).read_text(encoding="utf-8"))
            if name == "config.json":
                config["dtype"] = str(dtype).removeprefix("torch.")
            (folder / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class _CachedReader(SafeReader):
    """Reads the metadata once, not for every tensor."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
