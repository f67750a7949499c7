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

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from zeroamp.discovery.caches import nothing_left
from zeroamp.discovery.fake_run import fake_run
from zeroamp.dry_run.inputs import Arguments, sequences_are_not_packed
from zeroamp.hooks._torch.dispatch import is_part_of_parameter, storage_key, storage_of
from zeroamp.hooks.callers_containers import CallersContainers
from zeroamp.hooks.observers.tracing import OpRecorder
from zeroamp.hooks.precision.module_casts import cast_inputs, run_in_fp32
from zeroamp.hooks.precision.outputs import in_fp32
from zeroamp.hooks.tensors import tensors_in
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import ConfigError
from zeroamp.training.loss import LossFunction, loss_of

AllocationKind = Literal["activations", "workspace", "unsharded gradients"]
"""Activations are allocated in the forward and still exist at its end. All else, except gradients, is workspace."""

Point = Literal["begin forward", "end forward", "begin backward", "end backward"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A unit begins or ends its forward or backward here. The unit "" is the root."""

    point: Point
    unit: str


@dataclass(slots=True)
class Change:
    """A storage is allocated (bytes above 0) or freed (below 0)."""

    num_bytes: int
    kind: AllocationKind = "workspace"
    param: str = ""
    """FQN of the parameter, if this is a gradient; else ""."""


@dataclass(frozen=True, slots=True)
class GradientReady:
    """Autograd has accumulated a gradient of `num_bytes` into its parameter."""

    param: str
    num_bytes: int


Event = Mark | Change | GradientReady


class EventRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """Records every allocation and free while it is active. The ops return their results unchanged."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        """`existing`: tensors whose storages are not recorded."""
        super().__init__()
        self.events: list[Event] = []
        self.is_forward = True
        self.host_bytes = 0
        """Of what `offload` has moved."""
        self._births: dict[int, Change] = {}
        # Not the keys alone: a forward that assigns `parameter.data` frees the storage, and another would get its key.
        self._existing = {storage_of(tensor) for tensor in existing}

    def mark(self, point: Point, unit: str) -> None:
        """Record that the run has reached a point of a unit."""
        self.events.append(Mark(point, unit))

    def end_forward(self) -> None:
        """Classify what the forward allocated and has not freed as activations."""
        self.is_forward = False
        for change in self._births.values():
            change.kind = "activations"

    def offload(self, tensor: torch.Tensor) -> torch.Tensor | tuple[Any, ...]:
        """Do what the pack hook of `zeroamp.save_on_cpu` does: what is not of a parameter leaves the device."""
        if is_part_of_parameter(tensor):
            return tensor
        self.host_bytes += tensor.nbytes
        return tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    @staticmethod
    def reload(packed: torch.Tensor | tuple[Any, ...]) -> torch.Tensor:
        """Do what its unpack hook does: the strides keep their order."""
        if isinstance(packed, torch.Tensor):
            return packed
        size, stride, dtype, device = packed
        order = sorted(range(len(size)), key=lambda dim: -stride[dim])
        tensor = torch.empty([size[dim] for dim in order], dtype=dtype, device=device)
        return tensor.permute([order.index(dim) for dim in range(len(size))])

    def gradient_ready(self, param: str, parameter: torch.Tensor) -> None:
        """Record that autograd has accumulated a gradient into a parameter, whose FQN is `param`."""
        birth = None if parameter.grad is None else self._births.get(storage_key(parameter.grad))
        if birth is None:
            raise AssertionError(f"expected a gradient that the backward of {param} made, got {parameter.grad}")
        birth.kind, birth.param = "unsharded gradients", param
        self.events.append(GradientReady(param, birth.num_bytes))

    def see(self, _func: Any, _arguments: Any, out: Any) -> None:
        """Record the new storages of an op."""
        for tensor in tensors_in(out):
            self._record(tensor)

    def _record(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._births or storage_of(tensor) in self._existing:
            return
        birth = self._births[key] = Change(storage.nbytes())
        self.events.append(birth)
        weakref.finalize(storage, self._record_end, key).atexit = False

    def _record_end(self, key: int) -> None:
        birth = self._births.pop(key)
        self.events.append(Change(-birth.num_bytes, birth.kind, birth.param))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The trace of one forward and backward."""

    events: Sequence[Event]
    constant_bytes: int
    """Bytes of the inputs and of the buffers, which exist during the whole step."""
    host_bytes: int = 0
    """Bytes of the activations in host memory."""


def trace_micro_batch(
    model: nn.Module,
    plan: Plan,
    arguments: Arguments,
    *,
    device_type: str,
    checkpointing: bool,
    offload_activations: bool = False,
    loss_fn: LossFunction | None = None,
) -> MicroBatch:
    """Run forward and backward once on fake tensors. The model is not changed, and may be on the meta device.

    The ops are those of `device_type`: "cpu", or an accelerator of this machine. With `checkpointing`, each unit (the
    outermost of nested ones) saves its inputs only, and recomputes its forward in the backward. With
    `offload_activations`, the forward runs under `zeroamp.save_on_cpu`.
    """
    with nothing_left(model) as made:
        return _trace(model, plan, arguments, device_type, checkpointing, offload_activations, loss_fn, made)


def _trace(
    model: nn.Module,
    plan: Plan,
    arguments: Arguments,
    device_type: str,
    checkpointing: bool,
    offload_activations: bool,
    loss_fn: LossFunction | None,
    made: list[weakref.ReferenceType[torch.Tensor]],
) -> MicroBatch:
    parameters = {param.fqn: model.get_parameter(param.fqn) for param in plan.params}
    dtypes = {id(parameters[param.fqn]): param.group_key.param for param in plan.params}

    def dtype_of(tensor: torch.Tensor) -> torch.dtype:
        return dtypes.get(id(tensor), tensor.dtype)

    with sequences_are_not_packed(), fake_run(model, device_type, dtype_of, made) as fakes:
        args, kwargs = fakes.of(arguments)
        constant = [*tensors_in((args, kwargs)), *_tensors_beside_parameters(model)]
        fake_parameters = {fqn: fakes.of(parameter) for fqn, parameter in parameters.items()}
        recorder = EventRecorder([*fake_parameters.values(), *constant])
        sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in constant}
        _mark_units(model, plan, recorder, device_type, checkpointing)
        for fqn, parameter in fake_parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(recorder.gradient_ready, fqn))
        hooks = saved_tensors_hooks(recorder.offload, recorder.reload) if offload_activations else nullcontext()
        with recorder:
            is_autocast = plan.policy.mode == "autocast"
            with hooks:
                with torch.autocast(device_type, dtype=plan.policy.param_dtype, enabled=is_autocast):
                    output = model(*args, **kwargs)
                if plan.policy.low_dtype is not None:
                    output = in_fp32(output, plan.policy.low_dtype)
                loss = loss_of(output, loss_fn, where=type(model).__name__, error=ConfigError)
            del output
            recorder.end_forward()
            loss.float().div(plan.policy.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]
        del loss  # recorded as freed
        return MicroBatch(tuple(recorder.events), sum(sizes.values()), recorder.host_bytes)


def _tensors_beside_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the modules' buffers, and their attributes that are tensors but not parameters."""
    for module in model.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield value


def _mark_units(model: nn.Module, plan: Plan, recorder: EventRecorder, device_type: str, checkpointing: bool) -> None:
    """Mark where FSDP2 acts. `fake_run` undoes all changes of modules, also their hooks."""
    containers = CallersContainers()
    is_inner = {unit for unit in plan.units if any(unit.startswith(f"{other}.") for other in plan.units)}
    for unit in ("", *plan.units):
        module = model.get_submodule(unit)
        if checkpointing and unit and unit not in is_inner:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        _mark_unit(unit, module, recorder, containers)
        if (dtype := plan.input_dtype(unit)) is not None:
            cast = cast_inputs(dtype, containers, module.forward, plan.policy.keep_inputs_in_fp32)
            module.register_forward_pre_hook(cast, with_kwargs=True)
    output_dtype = None if plan.policy.mode == "autocast" else plan.policy.low_dtype
    for module in plan.fp32_regions.modules_of(model):
        run_in_fp32(module, device_type, output_dtype)


def _mark_unit(unit: str, module: nn.Module, recorder: EventRecorder, containers: CallersContainers) -> None:
    """Mark a unit's forward and its backward."""

    def begin(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder.mark("begin forward", unit)
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not tensors:
            return None
        marked = iter(_EndOfBackward.apply(recorder, unit, *tensors))  # type: ignore[no-untyped-call]
        others = {id(tensor): other for tensor, other in zip(tensors, marked, strict=True)}
        return containers.map_arguments(module, lambda tensor: others.get(id(tensor), tensor), args, kwargs)

    def end(_module: nn.Module, _args: Any, output: Any) -> None:
        if recorder.is_forward:  # a unit that is recomputed stays unsharded
            recorder.mark("end forward", unit)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda _gradient: recorder.mark("begin backward", unit)
                )

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, prepend=True)
    module.register_forward_hook(containers.end_forward, always_call=True)


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
