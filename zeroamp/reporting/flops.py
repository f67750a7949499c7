"""Model FLOPs of a forward and backward, counted on tensors that hold no values."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks.tracing.model_flops import flops_of_run
from zeroamp.planning.example_inputs import example_arguments
from zeroamp.policies.errors import WrapError, describe


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
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        found = "a model that FSDP2 has sharded"
        raise WrapError(describe(type(model).__name__, found, "a plain model", "Call count_flops before wrap_model."))
    args, kwargs = example_arguments(model, example_inputs)
    try:
        return flops_of_run(model, args, kwargs)
    # Whatever fake tensors make a forward raise: there is no one class for "this needs a value".
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        found = f"a forward that fake tensors cannot run ({type(error).__name__}: {message})"
        remedy = "Count by hand: about 6 x parameters x tokens."
        raise WrapError(
            describe(type(model).__name__, found, "inputs that fit, and control flow that needs no values", remedy)
        ) from error
