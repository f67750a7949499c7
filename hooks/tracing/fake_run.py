"""Lets a model run on fake tensors, or on copies of its tensors, and leaves it exactly as it was."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

_DICTS = (dict, OrderedDict, defaultdict)


class Replacements:
    """Copies values with every tensor replaced: the same tensor, or container, always by the same replacement."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make = make
        # The original is kept beside its copy: an id stays its own only while the object lives.
        self._copies: dict[int, tuple[object, Any]] = {}

    def of(self, value: Any) -> Any:
        """Return `value` with its tensors replaced, in lists, tuples, dicts and sets at any depth.

        Containers are copied even if they hold no tensor: what a forward appends to a list of its module then goes
        into the copy. Objects of other kinds are returned as they are.
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
    """Replace every tensor that the modules of `model` hold, parameters, buffers and plain attributes; undo it after.

    The attributes of each module are saved and put back whole, so whatever the forward sets, reassigns or appends is
    gone after it, and every Parameter, buffer and container is the same object as before. It works for references
    that go round `named_parameters` as well, such as `nn.LSTM`'s list of its weights, which
    `torch.func.functional_call` has to treat apart; nor does a module registered at two paths matter.
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
        # A parameter that the forward reaches by another way, a closure say, is not replaced and has got a gradient.
        for parameter, gradient in gradients:
            parameter.grad = gradient
