"""What a checkpoint holds for an export without the model: names in files, and a transformers model's config."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn

from zeroamp.export import save_config
from zeroamp.model_weights import find_weights
from zeroamp.policies.errors import CheckpointError

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
