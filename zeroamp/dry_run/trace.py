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
from typing import Any

import torch
from torch import nn

from zeroamp.dry_run.events import Event
from zeroamp.dry_run.inputs import Arguments, sequences_are_not_packed
from zeroamp.dry_run.recorder import MemoryRecorder
from zeroamp.dry_run.unit_marks import UnitMarks
from zeroamp.hooks._torch.dispatch import FakeTensorMode, storage_key, tree_map
from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.hooks.tensors import tensors_in
from zeroamp.hooks.tracing.fake_run import Replacements, tensors_replaced
from zeroamp.hooks.tracing.recorded_run import replacement
from zeroamp.planning.plan import Plan
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
    dtypes = {id(model.get_parameter(param.fqn)): param.dtypes.param for param in plan.params}
    replacements = Replacements(
        lambda tensor: replacement(tensor, dtypes.get(id(tensor), tensor.dtype), device_type, fake=True)
    )
    parameters = {param.fqn: model.get_parameter(param.fqn) for param in plan.params}
    with ExitStack() as stack:
        stack.enter_context(sequences_are_not_packed())
        stack.enter_context(preserved_random_state(device_type))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(tensors_replaced(model, replacements))
        args, kwargs = _cast_inputs(replacements.of(arguments), plan)
        constant = [*tensors_in((args, kwargs)), *_held(model)]
        recorder = MemoryRecorder([*(replacements.of(parameter) for parameter in parameters.values()), *constant])
        sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in constant}
        marks = UnitMarks(model, plan, recorder, device_type, checkpointing, kept or {})
        stack.callback(marks.remove)
        marks.attach({fqn: replacements.of(parameter) for fqn, parameter in parameters.items()})
        _step(model, plan, recorder, (args, kwargs), device_type, loss_fn)
        return Trace(tuple(recorder.events), sum(sizes.values()))


def _step(
    model: nn.Module,
    plan: Plan,
    recorder: MemoryRecorder,
    arguments: Arguments,
    device_type: str,
    loss_fn: LossFunction | None,
) -> None:
    args, kwargs = arguments
    is_autocast = plan.policy.mode == "autocast"
    with recorder:
        with torch.autocast(device_type, dtype=plan.policy.gather_dtype) if is_autocast else nullcontext():
            output = model(*args, **kwargs)
        loss = _loss(output, loss_fn)
        del output
        recorder.end_of_forward()
        loss.float().div(plan.policy.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]


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
