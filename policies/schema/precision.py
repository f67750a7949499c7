"""The blocks that set dtypes: `torch_autocast`, `bf16`, `fp16`, `data_types`, and the items of `zeroamp.overrides`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import shown
from zeroamp.policies.schema.foreign import with_foreign_keys
from zeroamp.policies.schema.keys import Block, Dtype, Honoured, Names, Number, PositiveInt, refused


class TorchAutocastBlock(Block):
    """`torch_autocast`: per-op precision of `torch.autocast`."""

    enabled: Annotated[
        bool,
        Honoured("run the forward under `torch.autocast`; safe parameters are all-gathered and reduced in `dtype`"),
    ] = False
    dtype: Annotated[Dtype | None, Honoured("`bfloat16` or `float16`; must be given if enabled")] = None
    lower_precision_safe_modules: Annotated[
        Literal["auto"] | Names | None,
        Honoured(
            "classes, `package.module.Class` or bare, whose parameters are safe. `auto`: found by a traced run. "
            "Default: Linear, Conv1d, Conv2d, Conv3d"
        ),
    ] = None


@with_foreign_keys("bf16")
class Bf16Block(Block):
    """`bf16`: everything in bfloat16, fp32 master weights."""

    enabled: Annotated[
        bool, Honoured("all-gather and compute in bfloat16; sharded parameters and optimizer state stay fp32")
    ] = False
    check_grad_overflow: Annotated[
        bool, Honoured("skip steps whose gradients are not finite, as always with float16", True)
    ] = False
    bf16_optimizer_states: Annotated[
        bool | None, Honoured('true: the same as `data_types.optimizer_states_dtype` "bf16"', False)
    ] = None


@with_foreign_keys("fp16")
class Fp16Block(Block):
    """`fp16`: everything in float16, fp32 master weights. Its loss-scale keys apply to float16 autocast as well."""

    enabled: Annotated[
        bool, Honoured("all-gather and compute in float16; sharded parameters and optimizer state stay fp32")
    ] = False
    loss_scale: Annotated[
        Number, Field(ge=0, le=2.0**127), Honoured("0: dynamic; else a fixed scale, above 1. Also for float16 autocast")
    ] = 0.0
    initial_scale_power: Annotated[
        int,
        Field(ge=0, le=127),  # the scale itself is fp32
        Honoured("the first dynamic scale is 2 to the power of this"),
    ] = 16
    loss_scale_window: Annotated[PositiveInt, Honoured("steps without overflow before the scale doubles")] = 1000
    hysteresis: Annotated[PositiveInt, Honoured("overflows before the scale halves")] = 2
    consecutive_hysteresis: Annotated[bool, Honoured("any step without overflow resets the count of overflows")] = False
    min_loss_scale: Annotated[Number, Field(gt=0), Honoured("an overflow at this scale is an error")] = 1.0


class DataTypesBlock(Block):
    """`data_types`: dtypes of the training state."""

    grad_accum_dtype: Annotated[
        Dtype | None,
        Honoured("dtype in which gradients of micro-batches are summed: docs/accumulation.md. Default: fp32"),
    ] = None
    param_dtype: Annotated[
        Dtype | None, Honoured("must be the dtype of the enabled `bf16` or `fp16` block, else fp32")
    ] = None
    optimizer_states_dtype: Annotated[
        Literal["fp32", "bf16"],
        Honoured(
            "dtype of AdamW's two moments; the update and the weights stay fp32 (docs/optimizers.md). `bf16`: 12 bytes "
            "per parameter instead of 16"
        ),
    ] = "fp32"
    buffer_dtype: Annotated[
        Dtype | None,
        Honoured("`wrap_model` casts floating-point buffers to this dtype. Default: buffers are not cast"),
    ] = None
    keep_in_fp32_modules: Annotated[
        Literal["auto"] | Names,
        Honoured(
            "modules that are all-gathered and computed in fp32 in every mode (docs/exceptions.md). `auto`: those that "
            "a transformers model names"
        ),
    ] = "auto"


def _as_list(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise refused(f"must be a pattern or a list of patterns, but is {shown(value)}. Change the value.")
    return value


class OverrideBlock(Block):
    """An item of `zeroamp.overrides`: dtypes for some modules. At least one of the three must be given."""

    modules: Annotated[
        Names,
        BeforeValidator(_as_list),
        Honoured(
            "one pattern or a list: an FQN or its last parts, or a class, `package.module.Class` or bare; `*` and `?` "
            "too; or `@lm_head` or `@router`. It applies to all modules inside"
        ),
    ]
    compute: Annotated[
        Dtype | None,
        Honoured(
            "`fp32`: the modules compute in fp32, and their parameters are all-gathered in it. The config's low dtype: "
            "the parameters are all-gathered in it, whatever their class"
        ),
    ] = None
    param: Annotated[
        Dtype | None,
        Honoured("dtype of the all-gather, fp32 or the config's low dtype. Does not change the compute dtype"),
    ] = None
    communication: Annotated[Dtype | None, Honoured("communication dtype of the gradients")] = None

    def settings(self) -> str:
        """Return the dtypes that are given: "compute fp32, communication bf16"."""
        given = {name: getattr(self, name) for name in ("compute", "param", "communication")}
        return ", ".join(f"{name} {short_name(dtype)}" for name, dtype in given.items() if dtype is not None)
