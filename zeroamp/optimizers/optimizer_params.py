"""The keys of `optimizer.params`: arguments of torch's optimizers. Meanings and defaults are DeepSpeed's (0.19.8)."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from zeroamp.optimizers.typed_params import NotNegative, TypedParams
from zeroamp.policies.schema.keys import Block, Honoured, Number, Unsupported, as_tuple

Beta = Annotated[Number, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(as_tuple)]


class _TorchParams(Block):
    """The keys that `optimizer.params` has for every type."""

    lr: Annotated[NotNegative, Honoured("learning rate. A scheduler sets it from the first step on")] = 1e-3
    foreach: Annotated[
        bool | None, Honoured("torch's implementation over lists of tensors. Default: torch chooses by device")
    ] = None
    fused: Annotated[
        bool | None, Honoured("torch's implementation in one kernel. Default: true on CUDA, unless `foreach` is set")
    ] = None
    maximize: Annotated[bool, Honoured("maximise the loss")] = False
    max_grad_norm: Annotated[object, Unsupported('Write "gradient_clipping" at the top level.', (None,))] = None


class AdamParams(_TorchParams):
    """`optimizer.params` of Adam: the arguments of torch.optim.AdamW or torch.optim.Adam."""

    betas: Annotated[Betas, Honoured("decay of the running means of the gradient and of its square")] = (0.9, 0.999)
    eps: Annotated[NotNegative, Honoured("added to the denominator")] = 1e-8
    weight_decay: Annotated[
        NotNegative | None, Honoured("Default 0, as FusedAdam's; with torch_adam torch's: 0.01 for AdamW, 0 for Adam")
    ] = None
    adam_w_mode: Annotated[
        bool, Honoured('decoupled weight decay: "Adam" is torch.optim.AdamW, or torch.optim.Adam with false')
    ] = True
    amsgrad: Annotated[bool, Honoured("divide by the largest second moment so far (DeepSpeed: with torch_adam)")] = (
        False
    )
    torch_adam: Annotated[bool, Honoured("sets the default of weight_decay only: the optimizer is always torch's")] = (
        False
    )
    bias_correction: Annotated[
        bool, Unsupported("Remove it: torch's Adam always corrects the bias of its means.", (True,))
    ] = True

    @property
    def weight_decay_or_default(self) -> float:
        """The weight decay of the key, or its default, which depends on other keys."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.torch_adam and self.adam_w_mode else 0.0


class AdamWParams(AdamParams):
    """`optimizer.params` of AdamW: the arguments of torch.optim.AdamW."""

    adam_w_mode: Annotated[bool, Unsupported('Write "type": "Adam": DeepSpeed ignores the key here.', (True,))] = True


class SGDParams(_TorchParams):
    """`optimizer.params` of SGD: the arguments of torch.optim.SGD."""

    momentum: Annotated[NotNegative, Honoured("factor of the last update in the next one")] = 0.0
    dampening: Annotated[Number, Honoured("part of the gradient that is not added to the momentum")] = 0.0
    weight_decay: Annotated[NotNegative, Honoured("this times the weight is added to the gradient")] = 0.0
    nesterov: Annotated[bool, Honoured("Nesterov's momentum; needs momentum, and dampening 0")] = False


OPTIMIZER_PARAMS: dict[str, type[Block]] = {"Adam": AdamParams, "AdamW": AdamWParams, "SGD": SGDParams}
"""The block of `optimizer.params`, by `optimizer.type`."""

TYPES = TypedParams(
    blocks=OPTIMIZER_PARAMS, build_it="Build the optimizer yourself, after wrap_model, and pass it to TrainStep."
)
"""Loaded by the schema for a config with an `optimizer`."""
