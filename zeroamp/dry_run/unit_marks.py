"""Marks the points of a run at which FSDP2 acts, on a model that FSDP2 has not touched."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from zeroamp.dry_run.recorder import MemoryRecorder
from zeroamp.hooks._torch.dispatch import tree_map
from zeroamp.hooks.precision.fp32_regions import Fp32Region
from zeroamp.hooks.tensors import tensors_in
from zeroamp.planning.plan import Plan
from zeroamp.wrapping.attach import share_casts


class UnitMarks:
    """The marks on one model. Attach them inside `tensors_replaced`, which undoes what they do to modules."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        recorder: MemoryRecorder,
        device_type: str,
        checkpointing: bool,
        kept: Mapping[str, Sequence[str]],
    ) -> None:
        self._model, self._plan, self._recorder, self._device_type = model, plan, recorder, device_type
        self._checkpointing = checkpointing
        units = [fqn for unit in plan.units for fqn in plan.modules_of(unit)]
        is_inner = {fqn for fqn in units if any(fqn.startswith(f"{other}.") for other in units)}
        self._outermost = {unit for unit in plan.units if unit not in is_inner}
        self._handles: list[RemovableHandle] = []
        self._open: list[str] = []  # units whose forward is running
        for fqn, names in kept.items():
            modules = model.get_submodule(fqn)._modules
            for name in [name for name in modules if name not in names]:
                del modules[name]  # `tensors_replaced` puts the modules back

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Hook the units and the parameters."""
        for unit in ("", *self._plan.units):
            fqns = [fqn for fqn in self._plan.modules_of(unit) if self._has(fqn)]
            for index, fqn in enumerate(fqns):
                self._attach_unit(unit, fqn, is_first=index == 0, is_last=index + 1 == len(fqns))
        output_dtype = None if self._plan.policy.mode == "autocast" else self._plan.policy.low_dtype
        for fqn in filter(self._has, self._plan.fp32_regions.modules):
            Fp32Region(self._model.get_submodule(fqn), self._device_type, output_dtype)  # undone by `tensors_replaced`
        self._handles += share_casts(self._model, self._plan, self._device_type)
        for fqn, parameter in parameters.items():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._on_gradient(fqn)
                )
                self._handles.append(handle)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()

    def _has(self, fqn: str) -> bool:
        try:
            self._model.get_submodule(fqn)
        except AttributeError:
            return False
        return True

    def _attach_unit(self, unit: str, fqn: str, *, is_first: bool, is_last: bool) -> None:
        module = self._model.get_submodule(fqn)
        if self._checkpointing and unit in self._outermost:
            module.forward = _checkpointed(module.forward)  # undone by `tensors_replaced`
        recorder = self._recorder

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not is_first:
                return None
            self._open.append(unit)
            recorder.unit = unit
            recorder.mark("begin forward", unit)
            return _marked(recorder, unit, args, kwargs)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if not is_last:
                return
            if recorder.is_forward:  # a unit that is recomputed stays gathered
                recorder.mark("end forward", unit)
            self._open.pop()
            recorder.unit = self._open[-1] if self._open else ""
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(  # type: ignore[no-untyped-call]
                        lambda _gradient: recorder.mark("begin backward", unit)
                    )

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, prepend=True))

    def _on_gradient(self, fqn: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                raise AssertionError(f"expected a gradient of {fqn}, got None")
            self._recorder.gradient_ready(parameter.grad, fqn)

        return note


class _EndOfBackward(torch.autograd.Function):
    """Returns its inputs; once their gradients are known, the unit's backward has ended."""

    @staticmethod
    def forward(ctx: Any, recorder: MemoryRecorder, unit: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.point = recorder, unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        recorder, unit = ctx.point
        recorder.mark("end backward", unit)
        return (None, None, *gradients)


def _marked(recorder: MemoryRecorder, unit: str, args: Any, kwargs: Any) -> Any:
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not tensors:
        return None
    marked = iter(_EndOfBackward.apply(recorder, unit, *tensors))  # type: ignore[no-untyped-call]
    replaced = {id(tensor): other for tensor, other in zip(tensors, marked, strict=True)}
    return tree_map(lambda value: replaced.get(id(value), value), (args, kwargs))


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
