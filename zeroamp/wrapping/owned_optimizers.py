"""`OwnedOptimizers`: the optimizers that `TrainStep` steps, which the checks of other loops leave alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakSet

import torch


class OwnedOptimizers:
    """The optimizers that `TrainStep` steps."""

    is_updating: ClassVar[bool] = False
    """Whether a `TrainStep` of this process steps its optimizers now."""
    _all: ClassVar["WeakSet[torch.optim.Optimizer]"] = WeakSet()

    @classmethod
    def add(cls, optimizer: torch.optim.Optimizer) -> None:
        """Refuse calls of `optimizer.step` inside of an optimizer step, unless they come from `TrainStep`."""
        cls._all.add(optimizer)

    @classmethod
    def has(cls, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a `TrainStep` steps this optimizer."""
        return optimizer in cls._all

    @classmethod
    @contextmanager
    def updating(cls) -> Iterator[None]:
        """Step optimizers inside the context without the checks of `optimizer_hooks.py`."""
        cls.is_updating = True
        try:
            yield
        finally:
            cls.is_updating = False
            torch.clear_autocast_cache()  # casts of the old weights
