"""Optimizers that were built before `wrap_model`: `ParametersBefore` gives them the sharded parameters.

Other libraries take a model and its optimizer in one call, so their users build the optimizer first. `wrap_model`
replaces every parameter, but keeps the names: each old parameter is replaced by the sharded one of its name.
"""

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from zeroamp.wrapping.state import reshard


class ParametersBefore:
    """Maps the parameters that a model had before `wrap_model`, by weak references, to the sharded parameters."""

    def __init__(self, model: nn.Module) -> None:
        named = model.named_parameters(remove_duplicate=False)
        self._names = {id(parameter): (weakref.ref(parameter), fqn) for fqn, parameter in named}
        self._sharded: dict[str, nn.Parameter] = {}

    def wrapped(self, model: nn.Module) -> None:
        """Record the sharded parameters by name. Call this right after `wrap_model`."""
        reshard(model.modules())
        self._sharded = dict(model.named_parameters(remove_duplicate=False))

    def sharded(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sharded parameter of the same name; `parameter` itself if it is not an old one."""
        # `holds` compares the object too, because the id of a freed parameter may be used again.
        return self._sharded[self._names[id(parameter)][1]] if self.holds(parameter) else parameter

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether the model had this parameter."""
        reference, _ = self._names.get(id(parameter), (None, ""))
        return reference is not None and reference() is parameter

    def replaced(self) -> Iterator[torch.Tensor]:
        """Yield the old parameters that are still alive and were replaced."""
        for reference, fqn in self._names.values():
            old = reference()
            if old is not None and old is not self._sharded[fqn]:
                yield old

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace old parameters in the optimizers by the sharded ones: in param groups, and as keys of the state.

        Param groups stay the same objects, so schedulers that were built on the optimizer keep working. `TrainStep`
        shards the state.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self.sharded(parameter) for parameter in group["params"]]
            for old in list(optimizer.state):
                new = self.sharded(old)
                if new is not old:
                    optimizer.state[new] = optimizer.state.pop(old)
