"""The top level of the config, and errors that name the key.

Meanings and defaults are DeepSpeed's (0.19.8) except where a field says so.
"""

import difflib
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.schema.keys import Block, Number, inner_block
from zeroamp.policies.schema.optimizer import OptimizerBlock
from zeroamp.policies.schema.scheduler import SchedulerBlock

DtypeName = Literal["fp32", "float32", "float", "bf16", "bfloat16", "fp16", "float16", "half"]


def _only_int(value: object) -> object:
    # A Literal compares with ==, for which True is 1 and 2.0 is 2.
    if type(value) is not int:
        raise ValueError("the input should be an integer: 0, 1, 2 or 3")
    return value


StageNumber = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_only_int)]


class TorchAutocastBlock(Block):
    """`torch_autocast`: per-op precision of `torch.autocast`."""

    enabled: bool = False
    dtype: DtypeName | None = None
    lower_precision_safe_modules: list[str] | None = None


class Bf16Block(Block):
    """`bf16`: everything in bfloat16, fp32 master weights."""

    enabled: bool = False


class Fp16Block(Block):
    """`fp16`: everything in float16, fp32 master weights. Its loss-scale keys apply to float16 autocast as well."""

    enabled: bool = False
    loss_scale: Annotated[Number, Field(ge=0, le=2.0**127)] = 0.0
    initial_scale_power: Annotated[int, Field(ge=0, le=127)] = 16  # the scale itself is fp32
    loss_scale_window: Annotated[int, Field(gt=0)] = 1000
    hysteresis: Annotated[int, Field(ge=1)] = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[Number, Field(gt=0)] = 1.0


class ZeroOptimizationBlock(Block):
    """`zero_optimization`: what is sharded."""

    stage: StageNumber = 0
    stage3_param_persistence_threshold: Annotated[int, Field(ge=0)] = 100_000


class DataTypesBlock(Block):
    """`data_types`: dtypes of the training state."""

    grad_accum_dtype: DtypeName | None = None


class ZeroampBlock(Block):
    """`zeroamp`: what DeepSpeed has no key for."""

    reduce_accumulate_dtype: Literal["fp32", "native"] = "fp32"
    count_traffic: bool = True


class Config(Block):
    """The top level of a config."""

    torch_autocast: TorchAutocastBlock = TorchAutocastBlock()
    bf16: Bf16Block = Bf16Block()
    fp16: Fp16Block = Fp16Block()
    zero_optimization: ZeroOptimizationBlock = ZeroOptimizationBlock()
    data_types: DataTypesBlock = DataTypesBlock()
    gradient_accumulation_dtype: DtypeName | None = None
    communication_data_type: DtypeName | None = None
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    gradient_clipping: Annotated[Number, Field(ge=0)] = 0.0
    zeroamp: ZeroampBlock = ZeroampBlock()
    optimizer: OptimizerBlock | None = None
    scheduler: SchedulerBlock | None = None


def validate(cfg: dict[str, Any]) -> Config:
    """Check `cfg` against the schema.

    Raises:
        ConfigError: with one line per bad key.
    """
    try:
        return Config.model_validate(cfg)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain_error(detail) for detail in error.errors())) from None


def _explain_error(detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "refused":
        return describe(key, **detail["ctx"])
    if detail["type"] == "missing":
        return describe(key, "no such key", "a value", "Add it: it has no default.")
    if detail["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Remove it: zeroamp refuses what it would otherwise ignore."
        return describe(key, "a key that zeroamp does not support", ", ".join(known), hint)
    found = f"{type(detail['input']).__name__} {detail['input']!r}"
    return describe(key, found, detail["msg"], "Change the value; JSON types are not converted.")


def _known_keys(path: list[str]) -> list[str]:
    model: type[Block] = Config
    for part in path:
        inner = inner_block(model.model_fields[part])
        if inner is None:
            raise AssertionError(f"expected {part} to be a block, got {model.model_fields[part].annotation}")
        model = inner
    return sorted(model.model_fields)
