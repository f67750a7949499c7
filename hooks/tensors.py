"""The tensors inside arguments and results of forwards and ops, and the streams that use their memory."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples, mappings and dataclasses, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif _is_dataclass(value):
        value = [getattr(value, item.name) for item in fields(value)]
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        yield from tensors_in(item)


def _is_dataclass(value: Any) -> bool:
    """Do what `dataclasses.is_dataclass` does with an instance. torch 2.11 cannot compile that function of a dtype."""
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, type)


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return `value` with `change(tensor)` in place of each tensor, at any depth of containers.

    Containers are those in which FSDP2 casts: dataclasses, dicts, lists, tuples and sets, of any class; and deques. One
    in which something changes is copied. The others, and all other objects, are returned as they are.
    """
    return change(value) if isinstance(value, torch.Tensor) else _mapped(change, value)[0]


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> tuple[Any, bool]:
    """Return what `map_tensors` does, and whether anything changes. (`torch.compile` cannot compare tuples by `is`.)"""
    if isinstance(value, torch.Tensor):
        new = change(value)
        return new, new is not value
    parts = parts_of(value)
    mapped = {key: _mapped(change, part) for key, part in parts.items()}
    if not any(changes for _, changes in mapped.values()):
        return value, False
    news = {key: new for key, (new, _) in mapped.items()}
    if _is_dataclass(value):
        return _with_fields(value, news), True
    if type(value) is dict:
        return news, True
    if isinstance(value, dict):
        copied = copy(value)  # retains what else its class holds, such as the factory of a defaultdict
        copied.update(news)
        return copied, True
    items = list(news.values())
    is_named = hasattr(value, "_fields")
    return type(value)(*items) if is_named else type(value)(items), True


def parts_of(value: Any) -> dict[Any, Any]:
    """Return the parts of a container by key, position or field. Empty for all other objects."""
    if isinstance(value, torch.Tensor):
        return {}
    if _is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in fields(value) if item.init}
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple | set | deque) else {}


def _with_fields(value: Any, news: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with other fields. It retains attributes that are no fields, unless compiled."""
    if torch.compiler.is_compiling():
        return replace(value, **news)
    copied = copy(value)
    put = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for name, new in news.items():
        put(copied, name, new)
    return copied


def hold_for_current_stream(tensor: torch.Tensor) -> None:
    """Delay reuse of a tensor's memory until the work queued now in the current stream is done.

    For a tensor that was allocated in another stream. Nothing happens on a CPU.
    """
    if has_streams(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


@contextmanager
def allocating_in(stream: Any, device: torch.device) -> Iterator[None]:
    """Allocate tensors from the memory of `stream`; None is the current stream.

    The current stream must have waited for all work of `stream` that is queued now.
    """
    with nullcontext() if stream is None else torch.get_device_module(device).stream(stream):
        yield


def stream_of(device: torch.device) -> Any:
    """Return the device's current stream, or None on a CPU."""
    return torch.accelerator.current_stream(device) if has_streams(device) else None


def has_streams(device: torch.device) -> bool:
    """Return whether a device runs work in streams, in which memory may be freed while another stream uses it."""
    return device.type != "cpu"
