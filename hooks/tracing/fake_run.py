"""Runs a model on fake tensors, or on copies of its tensors, and restores it exactly."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

_DICTS = (dict, OrderedDict, defaultdict)


class Replacements:
    """Copies values with their tensors replaced. Equal objects get one replacement, however often they occur."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make = make
        # The original is retained beside its copy, so that its id is not reused.
        self._copies: dict[int, tuple[object, Any]] = {}

    def of(self, value: Any) -> Any:
        """Return `value` with its tensors replaced, in lists, tuples, dicts and sets at any depth.

        Containers are copied even if they contain no tensor: a forward that appends to a list of its module then
        appends to the copy. Objects of other types are returned as they are.
        """
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._keep(value, self._make(value))
        if type(value) in _DICTS or isinstance(value, UserDict):
            copied = self._keep(value, copy(value))
            copied.update({key: self.of(item) for key, item in value.items()})
            return copied
        if type(value) is list:
            copied = self._keep(value, [])
            copied.extend(self.of(item) for item in value)
            return copied
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            return self._keep(value, type(value)(*items) if hasattr(value, "_fields") else tuple(items))
        return self._keep(value, copy(value)) if type(value) is set else value

    def _keep(self, value: object, copied: Any) -> Any:
        self._copies[id(value)] = (value, copied)
        return copied


@contextmanager
def tensors_replaced(model: nn.Module, replacements: Replacements) -> Iterator[None]:
    """Replace the tensors of all modules of `model` inside the context: parameters, buffers and plain attributes.

    At the end the attributes of each module are restored. So what the forward sets, reassigns or appends is undone, and
    every Parameter, buffer and container is the same object as before. References that are not in `named_parameters`
    are replaced too, such as `nn.LSTM`'s list of its weights. A module may be registered at several paths.
    """
    saved = [(module, dict(vars(module))) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for module, attributes in saved:
            vars(module).update({name: replacements.of(value) for name, value in attributes.items()})
        yield
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)
        # A parameter that the forward reads from elsewhere, such as a closure, was not replaced and has a gradient now.
        for parameter, gradient in gradients:
            parameter.grad = gradient
