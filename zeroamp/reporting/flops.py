"""Model FLOPs of a forward and backward, counted on tensors that hold no values."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.example_inputs import example_arguments
from zeroamp.hooks import ModelFlops, tensors_in
from zeroamp.policies.errors import WrapError, describe


def count_flops(model: nn.Module, example_inputs: Any = None) -> int:
    """Return the FLOPs of one forward and backward of a micro-batch, for `RunReport(flops_per_step=...)`.

    Counted by the formulas of `torch.utils.flop_counter` on a copy of the model on the meta device: a multiplication
    and an addition are two; only matrix products, convolutions and attention count. The backward's are those of the
    gradients of every trainable parameter and of what lies between. What activation checkpointing recomputes is not
    counted: it is done once more, but it is not the model's. The model is left as it is.

    Args:
        model: a plain model, before `wrap_model`, on any device.
        example_inputs: a micro-batch, as `wrap_model` takes it: a tuple, a mapping or a tensor. None takes a
            transformers model's own `dummy_inputs`, whose size is hardly the one you train with.

    Raises:
        WrapError: the model is wrapped already, or its forward cannot run on the meta device.
        ConfigError: there are no inputs.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        found = "a model that FSDP2 has sharded"
        raise WrapError(describe(type(model).__name__, found, "a plain model", "Call count_flops before wrap_model."))
    args, kwargs = example_arguments(model, example_inputs)
    on_meta = _meta_copy(model)
    try:
        with torch.enable_grad(), ModelFlops() as counter:
            outputs = on_meta(*_to_meta(args), **_to_meta(kwargs))
            counter.is_in_backward = True
            roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
            # Of several outputs the first is the loss where there is one: the others would be counted beside it.
            torch.autograd.backward(roots[:1], [torch.ones_like(root) for root in roots[:1]])
    except (RuntimeError, NotImplementedError, TypeError) as error:
        found = f"a forward that the meta device cannot run ({type(error).__name__}: {str(error).splitlines()[0]})"
        remedy = "Count it by hand: about 6 x parameters x tokens."
        raise WrapError(
            describe(type(model).__name__, found, "one whose control flow needs no values", remedy)
        ) from error
    return int(counter.total)


def _meta_copy(model: nn.Module) -> nn.Module:
    # Each tensor is put into deepcopy's memo first, so that no weight is copied.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, Mapping):
        return {key: _to_meta(item) for key, item in value.items()}
    return type(value)(map(_to_meta, value)) if isinstance(value, list | tuple) else value
