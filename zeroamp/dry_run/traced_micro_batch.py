"""Traces one micro-batch on fake tensors, as every rank runs it: allocations, ops, and the points where FSDP2 acts.

[Note: What is traced]
The plain model runs, with its parameters in their `param_dtype`, so that the ops and what autograd saves are those of
the sharded model. In the place of FSDP2's hooks there are marks at the same points: before and after a unit's forward,
on the gradients of its outputs, and on those of its inputs. The trace does not contain what FSDP2 itself allocates at
these points: `zeroamp.dry_run.memory` adds it for each stage.

The ops are those of the current device type. Without an accelerator that is the CPU. Its flash attention saves what an
accelerator's does, but CUDA's autocast runs some ops in fp32 that the CPU's does not (softmax and losses among them).
So a trace on a machine with a GPU is more exact.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from zeroamp.discovery.fake_run import fake_run
from zeroamp.dry_run.events import Event, EventRecorder
from zeroamp.dry_run.inputs import Arguments, sequences_are_not_packed
from zeroamp.hooks._torch.dispatch import storage_key
from zeroamp.hooks._torch.dtensor import without_wrapper
from zeroamp.hooks.precision.module_casts import cast_inputs, run_in_fp32
from zeroamp.hooks.tensors import map_tensors, tensors_in
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import ConfigError
from zeroamp.training.loss import LossFunction, loss_of


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The trace of one forward and backward."""

    events: Sequence[Event]
    constant_bytes: int
    """Bytes of the inputs and of the buffers, which exist during the whole step."""


def trace_micro_batch(
    model: nn.Module,
    plan: Plan,
    arguments: Arguments,
    *,
    device_type: str,
    checkpointing: bool,
    loss_fn: LossFunction | None = None,
    children: Mapping[str, Sequence[str]] | None = None,
) -> MicroBatch:
    """Run forward and backward once on fake tensors. The model is not changed, and may be on the meta device.

    Args:
        model: the model of `plan`.
        plan: has the `param_dtype` of each parameter, and the units.
        arguments: (args, kwargs) of the model's forward.
        device_type: the device type of the ops: "cpu", or an accelerator of this machine.
        checkpointing: whether each unit (the outermost of nested ones) saves its inputs only, and recomputes its
            forward in the backward.
        loss_fn: the model's output -> a scalar loss. None: its `.loss`, or the output itself.
        children: FQN of a module list -> names of its children to run; see `zeroamp.dry_run.equal_layers`.

    Raises:
        ConfigError: the output has no scalar loss.
    """
    parameters = {param.fqn: model.get_parameter(param.fqn) for param in plan.params}
    dtypes = {id(parameters[param.fqn]): param.group_key.param for param in plan.params}

    def dtype_of(tensor: torch.Tensor) -> torch.dtype:
        return dtypes.get(id(tensor), tensor.dtype)

    with sequences_are_not_packed(), fake_run(model, device_type, dtype_of) as fakes:
        args, kwargs = fakes.of(arguments)
        constant = [*tensors_in((args, kwargs)), *_tensors_beside_parameters(model)]
        fake_parameters = {fqn: fakes.of(parameter) for fqn, parameter in parameters.items()}
        recorder = EventRecorder([*fake_parameters.values(), *constant])
        parts = map(without_wrapper, constant)
        sizes = {storage_key(part): part.untyped_storage().nbytes() for part in parts}
        for fqn, names in (children or {}).items():
            module = model.get_submodule(fqn)
            for name in [name for name, _ in module.named_children() if name not in names]:
                delattr(module, name)  # `fake_run` puts the modules back
        handles = _mark_units(model, plan, recorder, device_type, checkpointing)
        handles += _record_gradients(fake_parameters, recorder)
        try:
            with recorder:
                with ExitStack() as autocast:
                    if plan.policy.mode == "autocast":
                        autocast.enter_context(torch.autocast(device_type, dtype=plan.policy.param_dtype))
                    output = model(*args, **kwargs)
                loss = loss_of(output, loss_fn, where=type(model).__name__, error=ConfigError)
                del output
                recorder.end_forward()
                loss.float().div(plan.policy.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]
            del loss  # recorded as freed
        finally:
            for handle in handles:
                handle.remove()
        return MicroBatch(tuple(recorder.events), sum(sizes.values()))


def _tensors_beside_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the modules' buffers, and their attributes that are tensors but not parameters."""
    for module in model.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield value


def _mark_units(
    model: nn.Module, plan: Plan, recorder: EventRecorder, device_type: str, checkpointing: bool
) -> list[RemovableHandle]:
    """Mark where FSDP2 acts, and return the hooks' handles. `fake_run` undoes all other changes of modules."""
    present = {fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
    is_inner = {unit for unit in plan.units if any(unit.startswith(f"{other}.") for other in plan.units)}
    running: list[str] = []  # units in their forward, the innermost last
    handles: list[RemovableHandle] = []
    for unit in (unit for unit in ("", *plan.units) if unit in present):
        module = model.get_submodule(unit)
        if checkpointing and unit and unit not in is_inner:
            module.forward = _checkpointed(module.forward)  # undone by `fake_run`
        handles += _mark_unit(unit, module, recorder, running)
        if (dtype := plan.input_dtype(unit)) is not None:
            handles.append(module.register_forward_pre_hook(cast_inputs(dtype), with_kwargs=True))
    output_dtype = None if plan.policy.mode == "autocast" else plan.policy.low_dtype
    for module in plan.fp32_regions.modules_of(model):
        run_in_fp32(module, device_type, output_dtype)  # undone by `fake_run`
    return handles


def _mark_unit(unit: str, module: nn.Module, recorder: EventRecorder, running: list[str]) -> list[RemovableHandle]:
    """Mark a unit's forward and its backward."""

    def begin(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        running.append(unit)
        recorder.unit = unit
        recorder.mark("begin forward", unit)
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not tensors:
            return None
        marked = iter(_EndOfBackward.apply(recorder, unit, *tensors))  # type: ignore[no-untyped-call]
        replaced = {id(tensor): other for tensor, other in zip(tensors, marked, strict=True)}
        return map_tensors(lambda tensor: replaced.get(id(tensor), tensor), (args, kwargs))

    def end(_module: nn.Module, _args: Any, output: Any) -> None:
        if recorder.is_forward:  # a unit that is recomputed stays unsharded
            recorder.mark("end forward", unit)
        running.pop()
        recorder.unit = running[-1] if running else ""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda _gradient: recorder.mark("begin backward", unit)
                )

    return [module.register_forward_pre_hook(begin, with_kwargs=True), module.register_forward_hook(end, prepend=True)]


class _EndOfBackward(torch.autograd.Function):
    """Returns its inputs. Its backward marks the end of the unit's backward: the inputs' gradients are computed."""

    @staticmethod
    def forward(ctx: Any, recorder: EventRecorder, unit: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.point = recorder, unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        recorder, unit = ctx.point
        recorder.mark("end backward", unit)
        return (None, None, *gradients)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _record_gradients(parameters: Mapping[str, nn.Parameter], recorder: EventRecorder) -> list[RemovableHandle]:
    def hook(fqn: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: recorder.gradient_ready(fqn, parameter.grad)

    return [
        parameter.register_post_accumulate_grad_hook(hook(fqn))  # type: ignore[no-untyped-call]
        for fqn, parameter in parameters.items()
        if parameter.requires_grad
    ]
