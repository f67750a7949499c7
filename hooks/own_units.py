"""Hooks on an embedding or a head that is an FSDP unit of its own.

FSDP2's hooks on the module unshard it for its own forward. The hooks here cover these other cases:

* The module is called outside of the root's forward. FSDP2 would take it for the root. A WrapError names the module.
* Activation checkpointing recomputes the forward of an embedding. Its parameters are sharded at that time, because the
  backward of an embedding does not unshard them. They are unsharded, and resharded when the backward ends.
* The output of a Linear with a bias is a view of a matrix. FSDP2 would warn that an in-place op on a view loses FSDP2's
  hook on that view. `without_base` returns the output as a tensor that is not a view, without a copy.
* The model reads a parameter outside of the module's own forward (`F.linear(x, model.head.weight)`, as in a loss in
  chunks), where the parameter is a sharded DTensor. Reading the attribute inside the root's forward unshards the
  module. The module stays unsharded until the backward has ended, and is reduced then, as the root is. After one such
  read with gradients on, an embedding is no longer resharded after its lookup: that would cost a second all-gather.
* Another forward, without gradients or with a backward of its own, may run between a forward that reads a parameter and
  its backward. The other forward reshards the module. FSDP2 has no pre-backward hook for a read, so the backward of the
  first forward unshards the module here.
* The model calls the module, or reads a parameter, in `torch.inference_mode` inside a forward with gradients. The
  parameters are then unsharded outside of that mode, as `reshard_after_no_grad` does for a whole forward.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import is_in_backward, untraced, without_base
from zeroamp.hooks._torch.dtensor import num_axes
from zeroamp.hooks._torch.fsdp import post_forward_hook_id
from zeroamp.hooks.group_gradients import GroupGradients
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.errors import WrapError

logger = logging.getLogger("zeroamp")


class OwnUnit:
    """The hooks of one embedding or head that is a unit of its own.

    Create it after `fully_shard` and after the module's other hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        fqn: str,
        groups: Mapping[FSDPModule, GroupGradients],
        in_forward: Callable[[], bool],
        *,
        is_lookup: bool,
    ) -> None:
        """Register the hooks, and replace the module's class by a subclass that sees reads of its parameters.

        Args:
            module: the embedding or the head.
            fqn: the module's name, for messages.
            groups: each module that carries FSDP2's state of one parameter group of the unit (`module`, and a group
                holder for each further combination of dtypes) -> the gradients of that group.
            in_forward: returns whether a forward of the root is running.
            is_lookup: whether the module's backward runs without its parameters, as that of an embedding does.
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
            # Before FSDP2's own pre-hook, which would take the first unit that runs for the root.
            module.register_forward_pre_hook(self._check, prepend=True),
            module.register_forward_pre_hook(self._unshard_again, prepend=False),
            module.register_forward_hook(self._separate, prepend=True),
        ]
        self._separate_after_other_hooks()
        self._class = type(module)
        module.__class__ = _with_readable_parameters(self._class, self)

    def _separate_after_other_hooks(self) -> None:
        """Run `_separate` also just before FSDP2's hook, if others run before it: those of `parallelize_module`."""
        hooks = cast("OrderedDict[int, Any]", self._unit._forward_hooks)
        of_fsdp = post_forward_hook_id(cast(FSDPModule, self._unit))
        order = [each for each in hooks if each != self._handles[-1].id]
        if order[0] != of_fsdp:
            self._handles.append(self._unit.register_forward_hook(self._separate))
            for each in order[order.index(of_fsdp) :]:
                hooks.move_to_end(each)

    def remove(self) -> None:
        """Remove the hooks, and restore the module's class."""
        for handle in self._handles:
            handle.remove()
        self._unit.__class__ = self._class

    @untraced
    def read(self, name: str, value: DTensor) -> Any:
        """Return the parameter `value`. If it is sharded and the model's forward reads it, unshard it first."""
        is_read = self._in_forward() and not is_in_backward() and num_axes(value) == self._num_sharded[name]
        return self._unshard_to_read(name) if is_read else value

    def unshard_in_backward(self, output: object) -> None:
        """Unshard the parameters when a backward through `output` begins, if any forward with gradients has read them.

        Reads are seen only while the parameters are sharded. So after the first read, later forwards count as reading
        them too.
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
        # The type is checked here, so that a compiled forward reads its own unsharded parameters without a graph break.
        return own.read(name, value) if isinstance(value, DTensor) and name in own.names else value

    return type(cls.__name__, (cls,), {"__getattr__": read, "__module__": cls.__module__})
