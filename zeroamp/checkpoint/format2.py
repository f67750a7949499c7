"""Reads the layout of the tensors of a checkpoint in format 2, from the pickle that torch.distributed.checkpoint wrote.

No class or function that the pickle names is looked up. Each name becomes a new class, which only stores what the
pickle gives to its instances. So whatever a pickle calls, or sets attributes of, ends with this read.
"""

import pickle
from pathlib import Path
from typing import Any

from zeroamp.checkpoint.manifest import METADATA, Layout, Manifest, layout_problem, validated_layouts
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights.untrusted_files import open_regular

_ENTRIES = "TensorStorageMetadata"
"""The class of descriptions of tensors. torch unpickles what others describe freely."""


class _Stored:
    """Arguments and state of an object in a pickle."""

    name = ""
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Stored,), {"name": f"{module}.{name}"})


def read_layouts(folder: Path, manifest: Manifest) -> dict[str, Layout]:
    """Return the layouts of a checkpoint's tensors by name.

    Raises:
        CheckpointError: the manifest does not list the file, it is not torch's description of tensors in files that the
            manifest lists, or these do not fill each tensor exactly once.
    """
    path = folder / METADATA
    try:
        if METADATA not in manifest.files:
            raise ValueError("the manifest does not list it")
        with open_regular(path) as file:
            layouts = _layouts(_Unpickler(file).load().state)
        problem = layout_problem(layouts, manifest.files)
    except Exception as error:  # a crafted pickle may raise anything
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise CheckpointError(
            f"{path} must describe the tensors of the checkpoint as torch.distributed.checkpoint does, but does not: "
            f"{problem}. Load another checkpoint."
        )
    return layouts


def _layouts(metadata: dict[str, Any]) -> dict[str, Layout]:
    places = {
        (index.state["fqn"], _size(index.state["offset"])): place.state
        for index, place in metadata["storage_data"].items()
    }
    found = {}
    for name, entry in metadata["state_dict_metadata"].items():
        if type(entry).__name__ != _ENTRIES:
            raise ValueError(f"{name} is no tensor")
        chunks = []
        for chunk in entry.state["chunks"]:
            offsets, shape = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
            if 0 not in shape:
                place = places[name, offsets]
                chunks.append([offsets, shape, place["relative_path"], place["offset"], place["length"]])
        dtype = entry.state["properties"].state[0].name.removeprefix("torch.")
        found[name] = {"dtype": dtype, "shape": _size(entry.state["size"]), "chunks": chunks}
    return validated_layouts(found)


def _size(size: Any) -> tuple[Any, ...]:
    """Return a `torch.Size`, whose only argument is a tuple."""
    return tuple(size.args[0])
