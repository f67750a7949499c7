"""Model FLOPs of a forward and backward, counted on tensors that hold no values."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from zeroamp.hooks._torch.dispatch import TorchDispatchMode, count_op_flops, run_op
from zeroamp.hooks.tensors import tensors_in
from zeroamp.hooks.tracing.experts import route_evenly
from zeroamp.hooks.tracing.fake_run import Replacements, tensors_replaced
from zeroamp.hooks.tracing.recorded_run import replacement, run_context
from zeroamp.planning.example_inputs import example_arguments
from zeroamp.policies.errors import WrapError


def count_flops(model: nn.Module, example_inputs: Any = None) -> int:
    """Return the FLOPs of one forward and backward of a micro-batch, for `RunReport(flops_per_step=...)`.

    Counted by the formulas of `torch.utils.flop_counter` in a run on fake tensors, which computes nothing and takes no
    memory: a multiplication and an addition are two; only matrix products and convolutions count. Attention is its two
    products, masked positions too. The backward's are those of the gradients of every trainable parameter and of what
    lies between, from the model's first output that has a gradient. What activation checkpointing recomputes is not
    counted: it is done once more, but it is not the model's. The model is left as it is.

    Args:
        model: a plain model, before `wrap_model`, on any device, the meta device too.
        example_inputs: a micro-batch, as `wrap_model` takes it: a tuple, a mapping or a tensor. None takes a
            transformers model's own `dummy_inputs`, whose size is hardly the one you train with.

    Raises:
        WrapError: the model is wrapped already, or fake tensors cannot run its forward.
        ConfigError: there are no inputs.
    """
    name = type(model).__name__
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise WrapError(f"count_flops needs a plain model, but FSDP2 has sharded {name}. Call it before wrap_model.")
    args, kwargs = example_arguments(model, example_inputs)
    replacements = Replacements(lambda tensor: replacement(tensor, tensor.dtype, "cpu", fake=True))
    try:
        with run_context("cpu", fake=True), torch.enable_grad(), tensors_replaced(model, replacements):
            args, kwargs = replacements.of(args), replacements.of(kwargs)
            route_evenly(model)
            # Plain products: of fused attention on the CPU torch has no formula, and others' compute scores twice.
            with sdpa_kernel(SDPBackend.MATH), ModelFlops() as counter:
                roots = [tensor for tensor in tensors_in(model(*args, **kwargs)) if tensor.requires_grad][:1]
                counter.is_in_backward = True
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    # Whatever fake tensors make a forward raise: there is no one class for "this needs a value".
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise WrapError(
            f"count_flops cannot run {name} on tensors without values: {type(error).__name__}: {message}. Check the "
            "inputs; control flow must not depend on values. Or count by hand: about 6 x parameters x tokens."
        ) from error
    return int(counter.total)


class ModelFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up torch's own formulas (`torch.utils.flop_counter`) for the ops inside. Returns what they return.

    `FlopCounterMode` would count what is recomputed as well. Recomputation records a graph; a backward does not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.is_in_backward = False
        """Set by the caller."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and count it."""
        kwargs = kwargs or {}
        out = run_op(func, args, kwargs)
        if not (self.is_in_backward and torch.is_grad_enabled()):
            self.total += count_op_flops(func, args, kwargs, out)
        return out
