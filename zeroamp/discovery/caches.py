"""Restores caches that the model's code fills in a traced run: fake tensors in them would break the next forward.

[Note: Which caches]
`caches_restored` copies what the model's code can reach by a name, and restores it if it contains a fake tensor after
the run. It covers the Python modules that define the model's classes, and those from which they import directly: their
globals, their classes, and objects of these classes. `nothing_left` then clears each `functools.lru_cache` that has a
fake tensor. It starts from the fake tensors that are still alive, because such a cache may have no name: transformers
has some in closures. If a fake tensor remains, an error names its place.
"""

import gc
import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import FakeTensor
from zeroamp.policies.errors import ConfigError

_OWN_PACKAGES = frozenset({*sys.stdlib_module_names, "torch", "zeroamp"} - {"__main__"})
_MAX_ITEMS = 10_000
"""Larger containers are data, not caches of tensors. They are not copied."""
_MAX_DEPTH = 6
"""How many containers around a fake tensor are searched for a `functools.lru_cache`."""

_RESTORED = (dict, OrderedDict, defaultdict, list, deque, set)
"""Exact types: the methods of a subclass may do anything, such as import what they contain."""


@contextmanager
def caches_restored(model: nn.Module) -> Iterator[None]:
    """Restore the state of the model's code on exit, where a fake tensor is in it. See [Note: Which caches]."""
    snapshots = [_Snapshot(owner) for owner in _owners(model)]
    try:
        yield
    finally:
        for snapshot in snapshots:
            snapshot.restore()


def _owners(model: nn.Module) -> list[Any]:
    """Return the Python modules of the model's code, their classes, and objects of these classes."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    modules = _python_modules(cls.__module__ for cls in classes)
    imported = (value for module in modules for value in _attributes_of(module).values())
    modules |= _python_modules(filter(None, map(_defining_module, imported)))
    owners, found = list[Any](), [*modules, *classes, *model.modules()]
    seen = set(map(id, found))
    while found:
        owners.append(owner := found.pop())
        attributes = _attributes_of(owner)
        for value in (item for each in (attributes, *_containers_in(attributes)) for item in _values(each)):
            if id(value) not in seen and _is_of(value if isinstance(value, type) else type(value), modules):
                seen.add(id(value))
                found.append(value)
    # `fake_run` restores the modules themselves.
    in_model = set(map(id, model.modules()))
    return [each for each in owners if id(each) not in in_model and hasattr(each, "__dict__")]


def _python_modules(names: Iterator[str]) -> set[ModuleType]:
    own = (name for name in names if name.partition(".")[0] not in _OWN_PACKAGES)
    return {module for name in own if isinstance(module := sys.modules.get(name), ModuleType)}


def _defining_module(value: object) -> str | None:
    if isinstance(value, ModuleType):
        return value.__name__
    is_function = isinstance(value, type | FunctionType) or hasattr(type(value), "cache_clear")
    return getattr(value, "__module__", None) if is_function else None


def _is_of(cls: type, modules: set[ModuleType]) -> bool:
    return sys.modules.get(cls.__module__) in modules


class _Snapshot:
    """The attributes of a Python module, class or object, and the items of the containers among them."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._attributes = _attributes_of(owner)
        containers = (each for each in _containers_in(self._attributes) if type(each) in _RESTORED)
        self._containers = [(each, _items(each)) for each in containers]

    def restore(self) -> None:
        """Undo all changes, if a fake tensor is among the attributes now."""
        now = _attributes_of(self._owner)
        if not _has_fake(now):
            return
        for container, items in self._containers:
            _set_items(container, items)
        for name in now.keys() | self._attributes.keys():
            before = self._attributes.get(name, now)  # `now` stands for no attribute
            if before is now and not isinstance(now[name], ModuleType):  # an import sets attributes too
                delattr(self._owner, name)
            elif before is not now and now.get(name) is not before:
                setattr(self._owner, name, before)


def _attributes_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, without those of Python itself, such as `__builtins__` of a module."""
    attributes = getattr(owner, "__dict__", {})
    return {name: value for name, value in list(attributes.items()) if not name.startswith("__")}


def _containers_in(value: object) -> Iterator[Any]:
    """Yield the containers in the values of a container, at any depth."""
    seen, stack = set[int](), [value]
    while stack:
        for item in _values(stack.pop()):
            if isinstance(item, (dict, list, deque, set, tuple)) and id(item) not in seen and len(item) <= _MAX_ITEMS:
                seen.add(id(item))
                stack.append(item)
                yield item


def _has_fake(value: object) -> bool:
    return any(isinstance(item, FakeTensor) for each in (value, *_containers_in(value)) for item in _values(each))


def _values(container: Any) -> list[Any]:
    return list(dict.values(container) if isinstance(container, dict) else container)


def _items(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _set_items(container: Any, items: Any) -> None:
    now = _items(container)
    is_same = len(now) == len(items) and all(map(operator.is_, _values(now), _values(items)))
    if not is_same or (isinstance(now, dict) and now.keys() != items.keys()):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(items)


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[list[ReferenceType[torch.Tensor]]]:
    """Remove fake tensors that a traced run has left in caches, once the run's frames have ended.

    Yields the list to which the run appends weak references to its fake tensors.

    Raises:
        ConfigError: code of the model retains a fake tensor that could not be removed.
    """
    made = list[ReferenceType[torch.Tensor]]()
    try:
        yield made
    except BaseException:
        _clear_caches(made)
        raise
    _clear_caches(made)
    if tensors := _left_over(made):
        raise ConfigError(
            f"{type(model).__name__} was run on fake tensors, and retains some of them in {_place(tensors)}. "
            "The next forward would read them. Remove the code that stores them there. Or delete them after this "
            'error, and list classes of modules in lower_precision_safe_modules instead of "auto".'
        )


def _clear_caches(made: Sequence[ReferenceType[torch.Tensor]]) -> None:
    """Clear each `functools.lru_cache` that contains a fake tensor of a run, at any depth up to `_MAX_DEPTH`."""
    inner = list[Any](_left_over(made))
    seen = {id(inner)}  # objects that were looked at, and lists of this function, which refer to them
    for _ in range(_MAX_DEPTH if inner else 0):
        holders, outer = gc.get_referrers(*inner), list[Any]()
        seen |= {id(holders), id(outer), *map(id, inner)}
        for holder in holders:
            if hasattr(type(holder), "cache_clear"):
                holder.cache_clear()
            elif id(holder) not in seen and not isinstance(holder, (FrameType, type, ModuleType, nn.Module)):
                outer.append(holder)
        inner = outer


def _left_over(made: Sequence[ReferenceType[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the fake tensors of a traced run that are still alive, without those in reference cycles."""
    if all(ref() is None for ref in made):
        return []
    gc.collect()
    return [tensor for ref in made if (tensor := ref()) is not None]


def _place(tensors: list[torch.Tensor]) -> str:
    """Return where tensors are, as the names of the containers around the first one with a container."""
    skipped = {id(tensors)}
    for tensor in tensors:
        names, holder = list[str](), _holder(tensor, skipped)
        while holder is not None and len(names) < _MAX_DEPTH:
            kind = type(holder).__name__
            names.append(str(getattr(holder, "__qualname__", None) or getattr(holder, "__name__", f"a {kind}")))
            is_named = isinstance(holder, type | ModuleType | FunctionType | nn.Module)
            holder = None if is_named else _holder(holder, skipped)
        if names:
            return " in ".join(names)
    return "an object that Python does not list"


def _holder(value: object, skipped: set[int]) -> Any:
    """Return an object that refers to a value, without frames. No inner function here: its cells would be found."""
    holders = gc.get_referrers(value)
    skipped.add(id(holders))
    for holder in holders:
        if id(holder) not in skipped and not isinstance(holder, FrameType):
            skipped.add(id(holder))
            return holder
    return None
