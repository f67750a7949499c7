"""Notices that a model asks for a tensor's dtype: such questions never reach the dispatcher."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ATTRIBUTES = frozenset({"dtype", "itemsize", "nbytes"})
_QUESTIONS = frozenset({"can_cast", "element_size", "result_type", "type"})
_OF_THE_OTHER = frozenset({"to", "type_as"})
"""`x.to(weight)` asks for the dtype of `weight`, not of `x`."""


class DtypeReads(TorchFunctionMode):
    """Hands every tensor whose dtype is asked for to `note`. Returns what the functions return, unchanged."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and see whether it is one of these questions."""
        kwargs = kwargs or {}
        asked = [value for value in _asked(func, [*args, *kwargs.values()]) if isinstance(value, torch.Tensor)]
        for tensor in asked:
            self._note(tensor)
        return func(*args, **kwargs)


def _asked(func: Any, arguments: list[Any]) -> list[Any]:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return arguments[:1] if func.__self__.__name__ in _ATTRIBUTES else []
    if name in _OF_THE_OTHER:
        return arguments[1:]
    return arguments if name in _QUESTIONS else []
