"""One micro-batch of a model on fake tensors, as every rank runs it: what it allocates, computes, and when.

[Note: What stands in for what]
The run is of the plain model, with its parameters as they are gathered: in their gather dtypes, so that the ops and
what autograd keeps are those of the sharded model. FSDP2's hooks are stood in for by marks at the same points: before
and after a unit's forward, on the gradients of its outputs, and on those of its inputs. What FSDP2 itself allocates at
these points is not in the trace: `zeroamp.dry_run.memory` adds it, at every stage.

The ops are those of the device type that the run is on. Without an accelerator that is the CPU, whose flash attention
keeps what an accelerator's does; but autocast for CUDA runs some ops in fp32 that it does not for the CPU (softmax and
losses among them), so that a trace with a GPU at hand is the more exact one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from zeroamp.dry_run.events import Event
from zeroamp.dry_run.inputs import Arguments, sequences_are_not_packed
from zeroamp.dry_run.recorder import MemoryRecorder
from zeroamp.hooks import Fp32Region, tensors_in
from zeroamp.hooks._fsdp import FakeTensorMode, storage_key, tree_map
from zeroamp.hooks.stand_ins import StandIns, preserved_rng, standing_in
from zeroamp.plan import Plan
from zeroamp.policies.errors import ConfigError, describe

LossFunction = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trace:
    """One forward and backward."""

    events: Sequence[Event]
    constant_bytes: int
    """Of the inputs and the buffers, which are there all the time."""


def trace(
    model: nn.Module,
    plan: Plan,
    arguments: Arguments,
    *,
    device_type: str,
    checkpointing: bool,
    loss_fn: LossFunction | None = None,
    kept: Mapping[str, Sequence[str]] | None = None,
) -> Trace:
    """Run forward and backward once on fake tensors. The model is left as it was; it may be on the meta device.

    Args:
        model: what `plan` is of.
        plan: says which parameters are gathered in which dtype, and which modules are units.
        arguments: of the model's forward.
        device_type: where the ops run: "cpu", or an accelerator that is here.
        checkpointing: whether the forward of each unit (the outermost, where units are nested) is run again in its
            backward, which keeps its inputs only.
        loss_fn: makes a scalar of the model's output. Default: its `.loss`, or the output itself.
        kept: FQN of a module list -> names of the children that are run; see `zeroamp.dry_run.repeats`.

    Raises:
        ConfigError: there is no scalar loss.
    """
    gather = {id(model.get_parameter(param.fqn)): param.dtypes.gather for param in plan.params}
    stand_ins = StandIns(lambda tensor: _stand_in(tensor, gather.get(id(tensor), tensor.dtype), device_type))
    parameters = {param.fqn: model.get_parameter(param.fqn) for param in plan.params}
    with ExitStack() as stack:
        stack.enter_context(sequences_are_not_packed())
        stack.enter_context(preserved_rng(device_type))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(standing_in(model, stand_ins))
        args, kwargs = _cast_inputs(stand_ins.of(arguments), plan)
        constant = [*tensors_in((args, kwargs)), *_held(model)]
        recorder = MemoryRecorder([*(stand_ins.of(parameter) for parameter in parameters.values()), *constant])
        sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in constant}
        run = _Run(model, plan, recorder, device_type, checkpointing, kept or {})
        stack.callback(run.remove)
        run.attach({fqn: stand_ins.of(parameter) for fqn, parameter in parameters.items()})
        run.step(args, kwargs, loss_fn)
        return Trace(tuple(recorder.events), sum(sizes.values()))


class _Run:
    """The marks on one model, and the run."""

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
                del modules[name]  # `standing_in` puts the modules back

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Hook the units and the parameters."""
        for unit in ("", *self._plan.units):
            fqns = [fqn for fqn in self._plan.modules_of(unit) if self._has(fqn)]
            for index, fqn in enumerate(fqns):
                self._attach_unit(unit, fqn, is_first=index == 0, is_last=index + 1 == len(fqns))
        output_dtype = None if self._plan.policy.mode == "autocast" else self._plan.policy.low_dtype
        for fqn in filter(self._has, self._plan.fp32_regions.modules):
            Fp32Region(self._model.get_submodule(fqn), self._device_type, output_dtype)  # undone by `standing_in`
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

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFunction | None) -> None:
        """Run forward and backward."""
        policy, recorder = self._plan.policy, self._recorder
        is_autocast = policy.mode == "autocast"
        with recorder:
            with torch.autocast(self._device_type, dtype=policy.gather_dtype) if is_autocast else nullcontext():
                output = self._model(*args, **kwargs)
            loss = _loss(output, loss_fn)
            del output
            recorder.end_of_forward()
            loss.float().div(policy.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]

    def _has(self, fqn: str) -> bool:
        try:
            self._model.get_submodule(fqn)
        except AttributeError:
            return False
        return True

    def _attach_unit(self, unit: str, fqn: str, *, is_first: bool, is_last: bool) -> None:
        module = self._model.get_submodule(fqn)
        if self._checkpointing and unit in self._outermost:
            module.forward = _checkpointed(module.forward)  # undone by `standing_in`
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


def _stand_in(tensor: torch.Tensor, dtype: torch.dtype, device_type: str) -> torch.Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device_type)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _cast_inputs(arguments: Arguments, plan: Plan) -> Arguments:
    """Cast floating inputs as FSDP2's root does in the modes that compute in a low precision throughout."""
    if plan.policy.mode not in ("bf16", "fp16"):
        return arguments

    def cast(value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(plan.policy.gather_dtype) if is_floating else value

    result: Arguments = tree_map(cast, arguments)
    return result


def _held(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that modules hold beside parameters."""
    for module in model.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield value


def _loss(output: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    loss = loss_fn(output) if loss_fn is not None else getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise ConfigError(
        describe(
            "model",
            f"{found} as what its forward returns",
            "a scalar loss that depends on trainable parameters, or an output with one as its .loss",
            "Give inputs that make the model return its loss (labels, say), or pass loss_fn.",
        )
    )
