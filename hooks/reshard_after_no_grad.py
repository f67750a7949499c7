"""Releases what an evaluation left gathered.

At stages 0 to 2, and for the root at stage 3, FSDP2 keeps parameters gathered after a forward, for the backward. After
a forward without gradients no backward comes: an optimizer step would then update shards behind stale gathered copies,
and an optimizer built at that moment would hold the copies and train nothing. A gather that was started ahead of a unit
that then did not run is released with them: a later forward would take it for current.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks._torch.fsdp import release


class ReshardAfterEvaluation:
    """Reshards every group of a model after an outermost forward with gradients off. The next forward gathers again."""

    def __init__(self) -> None:
        self._depth = 0
        self._groups: list[FSDPModule] = []

    def attach(self, root: nn.Module) -> list[RemovableHandle]:
        """Register on the root, around everything else; return the handles. All groups must exist."""
        self._groups = [module for module in root.modules() if isinstance(module, FSDPModule)]
        return [
            root.register_forward_pre_hook(lambda _module, _args: self.enter(), prepend=True),
            root.register_forward_hook(lambda _module, _args, _output: self.leave(), prepend=False, always_call=True),
        ]

    @untraced
    def enter(self) -> None:
        """Note that a forward, or a method registered as one, begins."""
        self._depth += 1

    @untraced
    def leave(self) -> None:
        """Note that it ended; reshard if it was the outermost."""
        if self._depth == 0:  # a hook before `enter` raised
            return
        self._depth -= 1
        if self._depth == 0 and not torch.is_grad_enabled():
            for group in self._groups:
                release(group)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Do both around a method that is registered as a forward."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def reset(self) -> None:
        """Forget forwards that were left without `leave`, by a KeyboardInterrupt."""
        self._depth = 0
