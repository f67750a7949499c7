"""What runs around an embedding or a head that is a unit of its own.

FSDP2's hooks on the module unshard it for its own forward. This covers what these hooks do not:

* Calling the module outside of the root's forward raises a WrapError that names it: FSDP2 would take the module for the
  root.
* A forward that is recomputed in a backward (activation checkpointing) finds the parameters of an embedding sharded,
  since its backward does not unshard them. They are unsharded then, and resharded when the backward ends.
* The output of a Linear with a bias is a view of a matrix. FSDP2 would warn that an in-place op on a view loses its
  hook on it. `without_base` returns the output as a tensor that is not a view, without a copy.
* Code of the model that reads a parameter outside of the module's own forward (`F.linear(x, model.head.weight)`, as
  in a loss in chunks) would meet a sharded DTensor. Reading the attribute inside the root's forward unshards the
  module. It stays unsharded until the backward has ended, and is reduced then, as the root is. After one such read with
  gradients on, an embedding is no longer resharded after its lookup. Resharding would cost a second all-gather.
* Another forward may run between such a forward and its backward, without gradients or with a backward of its own. It
  reshards the module, and a read has no pre-backward of FSDP2. The backward of the first forward unshards it again.
* In a forward that trains, code of the model may call the module, or read a parameter, in `torch.inference_mode`.
  Parameters are unsharded outside of that mode, as `reshard_after_no_grad` does for a whole forward in it.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import is_in_backward, untraced, without_base
from zeroamp.hooks._torch.dtensor import num_axes
from zeroamp.hooks._torch.group_gradients import GroupGradients
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.errors import WrapError

logger = logging.getLogger("zeroamp")


class OwnUnit:
    """Attached to one module, after `fully_shard` and after its other hooks. `remove` undoes it."""

    def __init__(
        self,
        module: nn.Module,
        fqn: str,
        groups: Mapping[FSDPModule, GroupGradients],
        in_forward: Callable[[], bool],
        *,
        is_lookup: bool,
    ) -> None:
        """Attach.

        Args:
            module: has the parameters.
            fqn: its name, for messages.
            groups: each module that carries FSDP2's state of one parameter group of the unit (`module`, and a group
                holder for each further combination of dtypes) -> the gradients of that group.
            in_forward: whether a forward of the root is running.
            is_lookup: whether the module's backward does not need the parameters.
        """
        self._unit, self._fqn, self._groups, self._in_forward = module, fqn, dict(groups), in_forward
        self._is_lookup = is_lookup
        self._has_been_read = False
        self.names = frozenset(name for name, _ in module.named_parameters(recurse=False))
        """The parameters' names in the module."""
        self._num_sharded = {name: num_axes(parameter) for name, parameter in module.named_parameters(recurse=False)}
        for carrier, gradients in self._groups.items():
            gradients.reduce_once()
            if is_lookup:
                carrier.set_unshard_in_backward(False)
        self._handles = [
            # First: a unit that FSDP2 sees before the root would be taken for the root.
            module.register_forward_pre_hook(self._check, prepend=True),
            module.register_forward_pre_hook(self._unshard_again, prepend=False),
            module.register_forward_hook(self._separate, prepend=True),
        ]
        self._class = type(module)
        module.__class__ = _with_readable_parameters(self._class, self)

    def remove(self) -> None:
        """Undo all that was attached."""
        for handle in self._handles:
            handle.remove()
        self._unit.__class__ = self._class

    @untraced
    def read(self, name: str, value: DTensor) -> Any:
        """Return the parameter `value`; if it is sharded and the model's forward is reading it, unsharded."""
        is_read = self._in_forward() and not is_in_backward() and num_axes(value) == self._num_sharded[name]
        return self._unshard_to_read(name) if is_read else value

    def unshard_in_backward(self, output: object) -> None:
        """Unshard the parameters when a backward through `output` begins, if forwards with gradients read them.

        A read is seen while they are sharded only, so that one that was seen stands for those of later forwards.
        """
        if self._has_been_read and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _grad: self._unshard())  # type: ignore[no-untyped-call]

    def _unshard_to_read(self, name: str) -> Any:
        if not self._has_been_read and torch.is_grad_enabled():
            self._has_been_read = True
            logger.info(
                "%s.%s is read outside of the forward of %s. It stays unsharded until the backward has ended.",
                *(self._fqn, name, self._fqn),
            )
            for carrier in self._groups if self._is_lookup else ():
                carrier.set_reshard_after_forward(False, recurse=False)
        self._unshard()
        for gradients in self._groups.values():
            gradients.count_forward()
        return self._unit._parameters[name]

    def _unshard(self) -> None:
        # Unsharded parameters that FSDP2 makes in inference mode would be inference tensors, which cannot be trained.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            for carrier in self._groups:
                carrier.unshard()

    def _is_sharded(self) -> bool:
        return any(0 < number == num_axes(self._unit._parameters[name]) for name, number in self._num_sharded.items())

    @untraced
    def _check(self, _module: nn.Module, _args: Any) -> None:
        if not self._in_forward() and not is_in_backward() and self._is_sharded():
            raise WrapError(
                f"{self._fqn} was called outside of the model's forward, where {self._fqn}.{min(self.names)} is "
                "sharded. Call it in a method of the model, and register that method: "
                'zeroamp.register_forward_method(model, "generate"), for example.'
            )
        if torch.is_inference_mode_enabled():
            self._unshard()

    @staticmethod
    def _separate(_module: nn.Module, _args: Any, output: Any) -> Any:
        return without_base(output) if isinstance(output, torch.Tensor) else output

    @untraced
    def _unshard_again(self, _module: nn.Module, _args: Any) -> None:
        if self._is_lookup and self._is_sharded():
            for carrier in self._groups:
                carrier.set_unshard_in_backward(True)
            self._unshard()
            for carrier in self._groups:
                carrier.set_unshard_in_backward(False)


def _with_readable_parameters(cls: type[nn.Module], own: OwnUnit) -> type[nn.Module]:
    """Return a subclass, of the same name, whose parameters are read through `own`."""

    def read(module: nn.Module, name: str) -> Any:
        value = cls.__getattr__(module, name)
        # The type is asked for here: a compiled forward reads its own unsharded parameters without a graph break.
        return own.read(name, value) if isinstance(value, DTensor) and name in own.names else value

    return type(cls.__name__, (cls,), {"__getattr__": read, "__module__": cls.__module__})
