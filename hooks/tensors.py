"""The tensors inside arguments and results of forwards and ops, and the streams that use their memory."""

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
    """Delay reuse of a tensor's memory until the work queued now in the current stream is done.

    For a tensor that was allocated in another stream. Nothing happens on a CPU.
    """
    if has_streams(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def has_streams(device: torch.device) -> bool:
    """Return whether a device runs work in streams, in which memory may be freed while another stream uses it."""
    return device.type != "cpu"


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the values of an unsharded parameter: itself, or what a float8 one of torchao has.

    The dtype of the float8 parameter itself is that of its gradient.
    """
    values: torch.Tensor = getattr(parameter, "_data", parameter)
    return values
