"""Guards that raise: modules called outside of the root's forward, weights read outside of their module, safe modules
with autocast off, backwards that bypass `TrainStep`, and second derivatives.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import accumulates_in, is_in_backward
from zeroamp.hooks._torch.dtensor import num_axes
from zeroamp.hooks.root_forward import ForwardContext
from zeroamp.hooks.tensors import tensors_in
from zeroamp.hooks.unit_hooks import Hook, wrap_forward
from zeroamp.policies.errors import PrecisionError, StepError, WrapError


def refuse_autocast_off(fqn: str, device_type: str) -> Hook:
    """Return a hook that raises a PrecisionError if the forward of the safe module `fqn` runs with autocast off.

    The module would run in low precision.
    """

    def check(module: nn.Module, _args: Any) -> None:
        if not torch.is_autocast_enabled(device_type):
            raise PrecisionError(
                f"{fqn} (a {type(module).__name__}) ran with autocast off, but its parameters are all-gathered in "
                "low precision. Outside of the model's forward, call it under train.autocast(), or in a method of the "
                'model that is registered: zeroamp.register_forward_method(model, "generate"), for example. If the '
                "model switches autocast off, leave its class out of torch_autocast.lower_precision_safe_modules, or "
                "set param fp32 for it in zeroamp.overrides: its parameters then stay fp32."
            )

    return check


def refuse_sharded(root: nn.Module, fqn: str, parameter: str, *, unless: Callable[[], bool] = lambda: False) -> Hook:
    """Return a hook that raises a WrapError if the forward of the module `fqn` runs while `parameter` is sharded.

    `parameter` belongs to the module or to a module inside it. Only the forward of the root, or of a unit around the
    module, unshards it; or that of the module itself, if `unless` returns True. Call after `fully_shard`. The hook runs
    before FSDP2's own pre-hook, which would take the first unit that runs for the root.
    """
    owner_fqn, _, name = parameter.rpartition(".")
    owner = root.get_submodule(owner_fqn)
    num_sharded = num_axes(owner._parameters[name])

    def check(_module: nn.Module, _args: Any) -> None:
        value: torch.Tensor | None = owner._parameters[name]
        if torch.compiler.is_compiling() or not isinstance(value, DTensor):
            return
        if num_axes(value) == num_sharded and not unless():
            raise WrapError(
                f"{fqn} was called outside of the model's forward, where {parameter} is sharded. Call a unit as "
                f"module(x), not as module.forward(x). If a method of the model calls {fqn}, register that method by "
                'its name: zeroamp.register_forward_method(model, "generate").'
            )

    return check


def explain_sharded_reads(root: nn.Module, own_units: Collection[str]) -> ForwardContext:
    """Return a `ForwardContext` that raises a WrapError in place of torch's error for an op on a sharded parameter.

    Each unit is unsharded by its own forward. A parameter of it that the model's forward reads elsewhere is a DTensor.
    `own_units` are the FQNs of the embeddings and heads that are units of their own.

    The context surrounds registered methods. The root's own forward is wrapped in it: torch silences an exception that
    a hook raises while a forward fails.
    """

    @contextmanager
    def around() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise WrapError(_read_sharded(root, error.__traceback__, own_units)) from error

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def explained(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            with around():
                return forward(*args, **kwargs)

        return explained

    wrap_forward(root, wrap)
    return lambda call: around() if call.is_outermost else None


def _read_sharded(root: nn.Module, traceback: TracebackType | None, own_units: Collection[str]) -> str:
    """Return the text for an error of a sharded read. It names the innermost module in whose forward it was raised."""
    callers = [frame.f_locals for frame, _ in walk_tb(traceback)]
    fqns = {module: fqn for fqn, module in root.named_modules()}
    in_modules = (names for names in reversed(callers) if isinstance(names.get("self"), nn.Module))
    names = next((names for names in in_modules if names["self"] in fqns), {"self": root})
    reader = names["self"]
    name = next(cls.__name__ for cls in type(reader).__mro__ if not issubclass(cls, FSDPModule))
    where = f"{fqns[reader] or 'The root'} (a {name})"
    whole = [variable for variable, value in names.items() if any(map(_is_whole_dtensor, tensors_in(value)))]
    if whole:
        return (
            f"{where} got a DTensor in {', '.join(whole)}, beside plain tensors. A new tensor of a sharded parameter "
            "is a DTensor, as in next(model.parameters()).new_zeros(size). Make it without the parameter: "
            "torch.zeros(size, device=inputs.device)."
        )
    text = (
        f"{where} read a sharded parameter of another module. Each FSDP unit is unsharded when it is called. In "
        f"auto_wrap_policy, name {name} or a module around it, and not the modules whose parameters it reads."
    )
    return f"{text} Or, if it was one of these: {_read_outside(own_units)}" if own_units else text


def _is_whole_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor that every rank has whole. Parameters, and results of them, are not."""
    return isinstance(tensor, DTensor) and all(placement.is_replicate() for placement in tensor.placements)


def attach_gradient_guard(parameter: nn.Parameter, unit: str) -> None:
    """Raise a WrapError in a backward that computes a gradient of a sharded parameter.

    FSDP2 sets the gradients of sharded parameters after it has reduced those of the unsharded ones. Autograd computes
    one only if the sharded parameter itself was used: `weight.full_tensor()`, in a loss in chunks, or
    `weight.pow(2).sum()`. Nothing would sum that gradient over ranks. `unit` is the FQN of the parameter's module.
    """

    def refuse(_grad: torch.Tensor) -> None:
        raise WrapError(_read_outside([unit]))

    parameter.register_hook(refuse)  # type: ignore[no-untyped-call]


def _read_outside(units: Iterable[str]) -> str:
    names = " or ".join(f"{fqn}.weight" for fqn in units)
    return (
        f"{names} was read outside of its module, where it is sharded: embeddings and heads are unsharded when they "
        'are called. Call the module, or set "zeroamp": {"own_units": false} in the config: the weights are then '
        "unsharded during the whole forward."
    )


class BackwardGuard:
    """Raises a StepError in a backward through the model's outputs, unless `TrainStep.backward` called it.

    Attached only if a plain `loss.backward(); optimizer.step()` would ignore a config key or skip parameters.
    `torch.autograd.grad`, and `backward(inputs=...)` of other tensors, set no parameter's gradient and do not raise.
    """

    armed: ClassVar[bool] = False
    """Whether a `TrainStep.backward` of any model of this process is running, which sets it. It is shared by all
    models, because a generator's loss also runs through the discriminator. The discriminator's own `TrainStep` refuses
    the gradients that this backward leaves."""

    def __init__(self, text: Callable[[], str], leaves: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Store what the check and its error need.

        Args:
            text: returns the error's text.
            leaves: returns the unsharded parameters, which are autograd's leaves.
        """
        self._text = text
        self._leaves = leaves

    def watch(self, output: object) -> None:
        """Hook the tensors in an output of the model. The output itself is not changed.

        Call before FSDP2's own post-forward hook: hooks on a tensor run in the order of their registration. If FSDP2's
        pre-backward ran first and this hook raised, FSDP2 would treat the backward as running for ever.
        """
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, _grad: torch.Tensor) -> None:
        if not self.armed and accumulates_in(self._leaves()):
            raise StepError(self._text())


def refuse_create_graph(_grad: torch.Tensor | None = None) -> None:
    """Raise a StepError if the running backward has `create_graph=True`, which alone enables gradients in a backward.

    FSDP2 reduces the gradients of a group and frees its unsharded parameters when the group's backward ends. The
    backward of the gradients would read the freed parameters, and no hook of FSDP2 precedes it.
    """
    if torch.is_grad_enabled() and is_in_backward():
        raise StepError(
            "A gradient was computed with create_graph=True through a wrapped model, as torch.func.grad and "
            "torch.func.vjp always do. Second derivatives would read parameters that FSDP2 has freed by then, so they "
            "are not supported. For first derivatives, call torch.autograd.grad(loss, inputs) without create_graph. "
            "For second derivatives, train this model with DistributedDataParallel."
        )


def watch_create_graph(output: object) -> None:
    """Refuse backwards with `create_graph=True` through an output of the model, before FSDP2's hooks run."""
    if torch.is_grad_enabled():
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(refuse_create_graph)  # type: ignore[no-untyped-call]
