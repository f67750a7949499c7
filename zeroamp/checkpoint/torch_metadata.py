"""Reads how torch.distributed.checkpoint describes tensors: after a save, and from its pickle in format 2.

No class or function that the pickle names is looked up. Each name becomes a new class, which only stores what the
pickle gives to its instances. So whatever a pickle calls, or sets attributes of, ends with this read.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any


class _Stored:
    """Arguments and state of an object in a pickle."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"dtype": state[0]})  # a tuple: of TensorProperties

    def __iter__(self) -> Iterator[int]:  # of a torch.Size, whose only argument is a tuple
        return iter(self.args[0])


class _Unpickler(pickle.Unpickler):
    def find_class(self, _module: str, name: str) -> Any:
        return type(name, (_Stored,), {})


def layouts_in(content: bytes) -> dict[str, Any]:
    """Return `layouts_of` the content of torch's pickle. A malformed pickle may raise any Exception."""
    found = _Unpickler(io.BytesIO(content)).load()
    return layouts_of(found.state_dict_metadata, found.storage_data)


def layouts_of(entries: Mapping[str, Any], storage: Mapping[Any, Any]) -> dict[str, Any]:
    """Return dtype, shape and chunks of each tensor as plain values, in the form of `manifest.Layout`.

    `entries` and `storage` are torch's `Metadata.state_dict_metadata` and `Metadata.storage_data`.
    """
    places = {(index.fqn, tuple(index.offset)): place for index, place in storage.items()}
    layouts = {}
    for name, entry in entries.items():
        chunks = []
        for chunk in entry.chunks:
            offsets, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            if 0 not in shape:
                place = places[name, offsets]
                chunks.append((offsets, shape, place.relative_path, place.offset, place.length))
        dtype = entry.properties.dtype
        dtype_name = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
        layouts[name] = {"dtype": dtype_name, "shape": tuple(entry.size), "chunks": chunks}
    return layouts
