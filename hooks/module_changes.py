"""`ModuleChanges`: what `wrap_model` and FSDP2 change on the modules of a model, so that it can be undone.

Hooks, methods, attributes and children that are added to a module are entries of the module's `__dict__`, or of a dict
in it, such as `_forward_hooks`. So the entries before and after are compared. A list of handles would have to be kept
at each place that adds something, and FSDP2 returns no handles.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroamp.hooks._torch.fsdp import leave_fsdp

_ABSENT, _UNKNOWN = object(), object()


@dataclass(slots=True)
class _Change:
    """One entry that was added or replaced."""

    owner: nn.Module
    entries: dict[Any, Any]
    """The `__dict__` of the owner, or a dict in it."""
    key: Hashable
    before: object
    """The value before the first change, or `_ABSENT`."""
    after: object
    """The value after the last one."""


class ModuleChanges:
    """The changes of modules that were noted."""

    def __init__(self) -> None:
        self._classes: dict[nn.Module, type[nn.Module]] = {}
        """The class of each module that FSDP2 has given another one."""
        self._changes: dict[tuple[int, Hashable], _Change] = {}

    @contextmanager
    def noting(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Note what the body adds to these modules, and which of their attributes and classes it replaces.

        Replaced parameters, buffers and children are not noted, and nothing retains their old values.
        """
        classes = {module: type(module) for module in modules}
        before = [
            (module, entries, dict(entries) if entries is vars(module) else dict.fromkeys(entries, _UNKNOWN))
            for module in classes
            for entries in (vars(module), *(each for each in vars(module).values() if isinstance(each, dict)))
        ]
        yield
        for module, plain in classes.items():
            if type(module) is not plain:
                self._classes.setdefault(module, plain)
        for module, entries, old in before:
            for key, value in entries.items():
                first = old.get(key, _ABSENT)
                if first is not _UNKNOWN and first is not value:
                    place = id(entries), key
                    earlier = self._changes.get(place)
                    first = first if earlier is None else earlier.before
                    self._changes[place] = _Change(module, entries, key, first, value)

    def replaced_since(self) -> tuple[nn.Module, str] | None:
        """Return a module and the name of its attribute that somebody has set again since it was noted; or None."""
        for change in self._changes.values():
            if change.entries.get(change.key, change.after) is not change.after:
                return change.owner, str(change.key)
        return None

    def undo(self) -> None:
        """Give the modules the classes and entries that they had. Entries that others have added stay."""
        for change in self._changes.values():
            if change.before is _ABSENT:
                change.entries.pop(change.key, None)
            else:
                change.entries[change.key] = change.before
        for module, plain in self._classes.items():
            leave_fsdp(module, plain)
        self._changes, self._classes = {}, {}
