"""Counts the model FLOPs of a forward and backward on fake tensors."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from zeroamp.discovery.fake_run import example_arguments, fake_run
from zeroamp.hooks._torch.dispatch import TorchDispatchMode, count_op_flops, run_op
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.errors import WrapError


def count_flops(model: nn.Module, example_inputs: Any = None) -> int:
    """Return the FLOPs of one forward and backward of a micro-batch, for `RunReport(flops_per_step=...)`.

    The model runs once on fake tensors, which compute nothing and take no memory. The formulas are those of
    `torch.utils.flop_counter`: a multiply-add counts as 2, and only matrix products, convolutions and attention count.
    Attention is its two products, masked positions included. The backward starts at the model's first output that
    requires a gradient. What activation checkpointing recomputes is not counted. The model is not changed.

    Args:
        model: a plain model, before `wrap_model`, on any device, the meta device too.
        example_inputs: a micro-batch, as `wrap_model` takes it: a tuple, a mapping or a tensor. None takes a
            transformers model's own `dummy_inputs`, which are smaller than most training batches.

    Raises:
        WrapError: the model is wrapped already, or its forward cannot run on fake tensors.
        ConfigError: no `example_inputs` were passed, and the model has no `dummy_inputs`.
    """
    name = type(model).__name__
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise WrapError(f"count_flops needs a plain model, but FSDP2 has sharded {name}. Call it before wrap_model.")
    args, kwargs = example_arguments(model, example_inputs)
    try:
        with fake_run(model, "cpu") as replacements:
            args, kwargs = replacements.of(args), replacements.of(kwargs)
            # MATH: torch has no formula for the CPU's fused attention, and counts the scores twice for other kernels.
            with sdpa_kernel(SDPBackend.MATH), ModelFlops() as counter:
                roots = [tensor for tensor in tensors_in(model(*args, **kwargs)) if tensor.requires_grad][:1]
                counter.is_in_backward = True
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    # A forward that needs the value of a fake tensor can raise any class of error.
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise WrapError(
            f"count_flops cannot run {name} on tensors without values: {type(error).__name__}: {message}. Check the "
            "inputs. Control flow must not depend on values. Or pass an estimate: about 6 x parameters x tokens."
        ) from error
    return int(counter.total)


class ModelFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the FLOPs of the ops inside it by `torch.utils.flop_counter`. The ops return their results unchanged.

    Unlike `FlopCounterMode`, it does not count recomputation: ops in the backward that run with gradients enabled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.is_in_backward = False
        """Whether the backward runs. The caller sets it."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and count it."""
        kwargs = kwargs or {}
        out = run_op(func, args, kwargs)
        if not (self.is_in_backward and torch.is_grad_enabled()):
            self.total += count_op_flops(func, args, kwargs, out)
        return out
