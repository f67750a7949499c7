"""The tensors in whatever a forward or an op takes and returns."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples, mappings and dataclasses, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, item.name) for item in fields(value)]
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        yield from tensors_in(item)
