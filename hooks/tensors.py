"""The tensors inside arguments and results of forwards and ops, and the streams that use their memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, deques, tuples, mappings and dataclasses, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif _is_dataclass(value):
        value = [getattr(value, item.name) for item in fields(value)]
    elif not isinstance(value, list | tuple | deque):
        return
    for item in value:
        yield from tensors_in(item)


def direct_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among `values`, and in tuples among them: all that are outside of mutable containers."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from direct_tensors(value)


def _is_dataclass(value: Any) -> bool:
    """Do what `dataclasses.is_dataclass` does with an instance. torch 2.11 cannot compile that function of a dtype."""
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, type)


_MUTABLE = (list, dict, deque)  # a tuple: torch.compile cannot trace a union of these
_PLAIN = (bool, int, float, str)


class Loan:
    """Replaces tensors in a caller's lists, dicts and objects for the time of a forward."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        """The mutable containers, at any depth."""
        self._written: list[tuple[Any, Any, Any, int, Any]] = []  # container, key, new, its changes then, old

    def write(self, change: Callable[[torch.Tensor], Any], container: Any, parts: dict[Any, Any]) -> None:
        """Write what `map_tensors` makes of each of `parts` into `container`."""
        if any(container is known for known in self.containers):
            return
        self.containers.append(container)
        for key, old in list(parts.items()):
            new, changes = _mapped(change, old, self)
            if changes:
                _set_part(container, key, new)
                self._written.append((container, key, new, _num_changes(new), old))

    def end(self) -> None:
        """Write the caller's elements back, except where the forward replaced or changed an element."""
        while self._written:
            container, key, new, changes, old = self._written.pop()
            if _num_changes(new) != changes:
                continue
            if _part(container, key) is new:
                _set_part(container, key, old)
            elif isinstance(container, list | deque):  # its elements may have moved
                for index, part in enumerate(container):
                    if part is new:
                        container[index] = old


def _num_changes(value: object) -> int:
    """Return how often a tensor was changed in place. 0 where this is not counted: inference tensors, compiled code."""
    if not isinstance(value, torch.Tensor) or torch.compiler.is_compiling() or value.is_inference():
        return 0
    return value._version


def may_have_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an argument is a container in which `map_tensors` looks."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) or value is None:
            continue
        if isinstance(value, list | dict | tuple | set | deque) or _is_dataclass(value):
            return True
    return False


def map_arguments(
    change: Callable[[torch.Tensor], Any], args: tuple[Any, ...], kwargs: dict[str, Any], loan: Loan | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `map_tensors` of each argument."""
    by_name = {name: map_tensors(change, value, loan) for name, value in kwargs.items()}
    return tuple(map_tensors(change, value, loan) for value in args), by_name


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any, loan: Loan | None = None) -> Any:
    """Return `value` with `change(tensor)` in place of each tensor, at any depth of containers.

    Containers are those in which FSDP2 casts: dataclasses, dicts, lists, tuples and sets, of any class; and deques. One
    in which something changes is copied. The others, and all other objects, are returned as they are. With a `loan`,
    dicts, lists, deques and dataclasses that are not frozen are not copied: the results are written into them until
    `loan.end()`.
    """
    if value is None or isinstance(value, _PLAIN):  # without a look for parts, because most arguments are plain
        return value
    return _mapped(change, value, loan)[0]


def _mapped(change: Callable[[torch.Tensor], Any], value: Any, loan: Loan | None) -> tuple[Any, bool]:
    """Return what `map_tensors` does, and whether anything changes. (`torch.compile` cannot compare tuples by `is`.)"""
    if isinstance(value, torch.Tensor):
        new = change(value)
        return new, new is not value
    parts = parts_of(value)
    if loan is not None and _is_mutable(value):
        loan.write(change, value, parts)
        return value, False
    mapped = {key: _mapped(change, part, loan) for key, part in parts.items()}
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
    """Return a copy of a dataclass with other fields. It retains other attributes, except in compiled code."""
    if torch.compiler.is_compiling():
        return replace(value, **news)
    copied = copy(value)
    put = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for name, new in news.items():
        put(copied, name, new)
    return copied


def _is_mutable(value: Any) -> bool:
    if _is_dataclass(value):
        return not value.__dataclass_params__.frozen
    return isinstance(value, _MUTABLE)


def _part(container: Any, key: Any) -> Any:
    """Return the element of a mutable container at `key`, or None if it is gone."""
    if _is_dataclass(container):
        return getattr(container, key, None)
    if isinstance(container, dict):
        return container.get(key)
    return container[key] if key < len(container) else None


def _set_part(container: Any, key: Any, value: Any) -> None:
    if _is_dataclass(container):
        setattr(container, key, value)
    else:
        container[key] = value


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


class HostCopy:
    """Copies a 1-D tensor to the host asynchronously. The host waits for the copy only when it reads the numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begin to copy. Do not change the tensor afterwards: a CPU tensor is copied only in `values`."""
        self._copied = tensor.to("cpu", non_blocking=True)  # into page-locked memory
        self._event: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device)
            self._event.record()

    def values(self) -> list[float]:
        """Return the numbers. Waits for the copy, but not for work that was launched after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copied.tolist()
