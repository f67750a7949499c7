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

    `weights.json` says under which names each of the model's tensors is written, and which are parameters. It is
    missing where the model's state holds something that is no tensor, so that safetensors could not hold the model.
    """
    try:
        weights = find_weights(root)
    except CheckpointError:
        return {}
    names = {
        weight.names[0]: {"written": list(weight.written_names), "is_parameter": weight.is_parameter}
        for weight in weights
    }
    with tempfile.TemporaryDirectory() as folder:
        save_config(root, Path(folder), torch.float32)
        config = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return {**config, WEIGHTS: json.dumps(names, indent=1).encode()}
