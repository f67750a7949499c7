"""Merged units: several modules that are unsharded, resharded and reduced as one FSDP unit.

[Note: Visits]
A *visit* of a merged unit is a run of its modules, one after the other, in a forward of the root. FSDP2 sees a visit as
one forward of the unit. A visit begins with the first module and ends after the last one. FSDP2's own hooks for
`fully_shard([block0, block1])` end a visit only then. The hooks here replace them, and also handle these cases:

* A forward leaves modules out or runs them in another order. At stage 3 a visit then ends when a module of another unit
  begins, and at the latest when the root's forward ends. A later module of the unit begins another visit. So parameters
  stay unsharded for as long as they would if the modules were units of their own. In the backward each visit unshards
  the unit again. The backward of the forward's first visit comes last, and reduces the gradients of all visits.
* A loss does not depend on the module that ran last. So a gradient of any module's output unshards the unit.
* A module runs in a backward (activation checkpointing), or outside of the root's forward. Each such call is a visit.

The inputs of each module pass through one autograd node, as FSDP2 does it for the inputs of the first module. So the
gradients of an activation that several modules read are added in the same order, and have the same bits, as without
merging.

Group holders (see `zeroamp.hooks.typed_groups`) follow the visits of their unit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import is_in_backward, untraced
from zeroamp.hooks._torch.fsdp import (
    begin_again,
    forward_hooks,
    is_unsharded,
    map_tensors,
    pre_backward_hook,
    remove_forward_hooks,
)
from zeroamp.hooks.group_gradients import GroupGradients
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.hooks.tensors import tensors_in


class MergedUnit:
    """One merged unit, and the state of its open visit. See [Note: Visits]."""

    def __init__(
        self, modules: Sequence[nn.Module], groups: Mapping[FSDPModule, GroupGradients | None], units: "MergedUnits"
    ) -> None:
        """Replace FSDP2's forward hooks on the modules.

        Args:
            modules: in registration order.
            groups: module that has the FSDP2 state of a parameter group -> the gradients of that group, or None if the
                group has no parameters. The first key is one of `modules`, which share one state. The others are group
                holders.
            units: all merged units of the root.
        """
        carriers = tuple(groups)
        self._modules, self._carriers, self._units = frozenset(modules), carriers, units
        for gradients in groups.values():
            if gradients is not None:
                gradients.reduce_once()
        hooks = [forward_hooks(carrier) for carrier in carriers]
        self._pre_forwards = [before for before, _ in hooks]
        self._post_forwards = [after for _, after in reversed(hooks)]
        self._pre_backwards = [pre_backward_hook(carrier) for carrier in reversed(carriers)]
        self._waiting: set[nn.Module] = set()
        """The modules that have not run yet in the open visit; empty if no visit is open."""
        self.num_running = 0
        """Modules whose forward has begun and not ended."""
        remove_forward_hooks(carriers[0])

    def attach(self, modules: Sequence[nn.Module]) -> Iterator[RemovableHandle]:
        """Register the hooks that replace FSDP2's."""
        for module in modules:
            yield module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            yield module.register_forward_hook(self._after, prepend=False)

    def forget(self) -> None:
        """Discard a visit that an exception has left open."""
        self._waiting.clear()
        self.num_running = 0

    def end(self) -> None:
        """End the open visit, in which some modules did not run."""
        self._waiting.clear()
        for post_forward in self._post_forwards:
            post_forward(cast(Any, None), None, None)

    @untraced
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._units.has_visits():
            for carrier in self._carriers:
                begin_again(carrier)
            return self._begin(module, args, kwargs)
        is_open = bool(self._waiting)
        self._units.enter(self)
        self.num_running += 1
        if is_open and all(is_unsharded(carrier) for carrier in self._carriers):
            return _separated(args, kwargs)
        self._waiting.update(self._modules)
        return self._begin(module, args, kwargs)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._units.reshards:
            args, kwargs = _separated(args, kwargs, self._reshard)
        for pre_forward in self._pre_forwards:
            args, kwargs = pre_forward(module, args, kwargs)
        return args, kwargs

    @untraced
    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._units.has_visits():
            self.num_running -= 1
            self._waiting.discard(module)
            if self._waiting or self.num_running:
                self._unshard_in_backward(output)
                return output
            self._units.leave(self)
        for post_forward in self._post_forwards:
            output = post_forward(module, args, output)
        if self._units.reshards:
            self._unshard_in_backward(output)
        return output

    def _unshard_in_backward(self, output: Any) -> None:
        """Unshard the unit when the backward reaches a module's output. FSDP2 does so for the last module only."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._pre_backward)  # type: ignore[no-untyped-call]

    @untraced
    def _pre_backward(self, grad: torch.Tensor) -> None:
        for pre_backward in self._pre_backwards:
            pre_backward(grad)
        for carrier in self._carriers:  # FSDP2 unshards once per reduction
            if not is_unsharded(carrier):
                carrier.unshard()

    @untraced
    def _reshard(self) -> None:
        """Reshard after the backward of a visit. After the backward of the first visit, FSDP2 has done so already."""
        for carrier in self._carriers:
            carrier.reshard()


class MergedUnits:
    """The merged units of one root."""

    def __init__(self, in_forward: Callable[[], bool], *, reshards: bool) -> None:
        """Start without merged units; `attach` adds them.

        Args:
            in_forward: returns whether the model's own code runs in a forward of the root.
            reshards: whether units are resharded after the forward and after the backward (stage 3).
        """
        self._in_forward = in_forward
        self.reshards = reshards
        self._all: list[MergedUnit] = []
        self._open: list[MergedUnit] = []

    def attach(
        self, modules: Sequence[nn.Module], groups: Mapping[FSDPModule, GroupGradients | None]
    ) -> list[RemovableHandle]:
        """Add a merged unit, after `fully_shard` of its modules; see `MergedUnit`. Return the handles of its hooks."""
        unit = MergedUnit(modules, groups, self)
        self._all.append(unit)
        return list(unit.attach(modules))

    def attach_other(self, module: nn.Module) -> RemovableHandle:
        """Make the forward of `module`, a unit that is not merged, end the open visits of merged units."""

        @untraced
        def before(_module: nn.Module, _args: Any) -> None:
            if self._open and self.has_visits():
                self.enter(None)

        return module.register_forward_pre_hook(before, prepend=True)

    def has_visits(self) -> bool:
        """Return whether modules that run now belong to a forward of the root, and not to a backward."""
        return self._in_forward() and not is_in_backward()

    def enter(self, unit: MergedUnit | None) -> None:
        """End the visits of all other units in which no module is running. Then open a visit of `unit`, unless None."""
        if self._open == [unit]:
            return
        for other in [other for other in self._open if other is not unit and not other.num_running]:
            if self.reshards:
                self._open.remove(other)
                other.end()
        if unit is not None and unit not in self._open:
            self._open.append(unit)

    def leave(self, unit: MergedUnit) -> None:
        """Record that the visit of a unit has ended."""
        if unit in self._open:
            self._open.remove(unit)

    def around(self, call: ForwardCall) -> AbstractContextManager[None] | None:
        """Return the context manager of a forward of the root, for `RootForward`. Its exit ends all visits."""
        return self._ending() if call.is_outermost else None

    @contextmanager
    def _ending(self) -> Iterator[None]:
        self._forget()
        try:
            yield
            while self._open:
                self._open.pop().end()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._open.clear()
        for unit in self._all:
            unit.forget()


class _Separate(torch.autograd.Function):
    """The identity on several tensors, as one autograd node that may call a function in the backward."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None] | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.then is not None:
            ctx.then()
        return None, *grads


def _separated(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a module's inputs that require gradients through one autograd node, as FSDP2 does; return all inputs.

    `then` is called when the backward of the module has ended.
    """
    if not torch.is_grad_enabled():
        return args, kwargs
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(note, (args, kwargs))
    if not found:
        return args, kwargs
    separate = iter(cast("tuple[torch.Tensor, ...]", _Separate.apply(then, *found)))  # type: ignore[no-untyped-call]
    new_args, new_kwargs = map_tensors(lambda t: next(separate) if t.requires_grad else t, (args, kwargs))
    return new_args, new_kwargs
