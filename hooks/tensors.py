"""The tensors in whatever a forward or an op takes and returns, and the streams that use their memory."""

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


def hold_for_current_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of a tensor of another stream allocated until the current stream has used it."""
    if has_streams(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def has_streams(device: torch.device) -> bool:
    """Return whether a device has streams, so that memory may be freed while another stream uses it. A CPU has none."""
    return device.type != "cpu"


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the values of an unsharded parameter: itself, or what a float8 one of torchao has.

    The dtype of the float8 parameter itself is that of its gradient.
    """
    values: torch.Tensor = getattr(parameter, "_data", parameter)
    return values
