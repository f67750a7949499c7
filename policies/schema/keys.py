"""The classes of config keys (honoured, native, unsupported), and the types of their values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from zeroamp.policies.dtypes import DTYPE_BY_NAME, short_name
from zeroamp.policies.errors import shown

SAME = object()
REMOVE_IT = "Remove it: zeroamp does not ignore unknown keys."


@dataclass(frozen=True, slots=True)
class Honoured:
    """The key has the effect that its note describes."""

    note: str
    """What the key does. Printed in the docs and in `Policy.report`."""
    deepspeed_default: Any = SAME
    """The default of DeepSpeed 0.19.8, if it differs from the field's."""
    other_name: str | None = None
    """A second name of the key, in the same block. `rename_keys` replaces it."""


@dataclass(frozen=True, slots=True)
class Native:
    """The key is accepted and has no effect: FSDP2 or zeroamp always does what it sets, or has no such setting."""

    note: str
    """The reason. Printed in the docs and in `Policy.report`."""
    other_name: str | None = None
    """A second name of the key, in the same block. `rename_keys` replaces it."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The key is an error, except with a value that disables it."""

    note: str
    """What to do instead, as a sentence. Printed in the docs and in the error."""
    off: tuple[Any, ...] = (None, False)
    """The values that disable the key."""


KeyClass = Honoured | Native | Unsupported


class Block(BaseModel):
    """A JSON object of the config. Unknown keys are errors, and values are not converted."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True)

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_unsupported(cls, value: object, info: ValidationInfo) -> object:
        key_class = own_class(cls.model_fields[str(info.field_name)])
        if not isinstance(key_class, Unsupported) or is_off(value, key_class):
            return value
        off = " or ".join(shown(item) for item in key_class.off if item is not None) or "left out"
        raise refused(f"must be {off}, but is {shown(value)}, which is not supported. {key_class.note}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the schema: its path, its class and its default."""

    path: str
    """With dots: "zero_optimization.stage"."""
    key_class: KeyClass
    default: Any
    """The value if the config does not have the key; pydantic's `PydanticUndefined` if the key must be given."""


def iter_keys(block: type[Block], prefix: str = "") -> Iterator[Key]:
    """Yield all keys of a block and of the blocks inside it.

    A field with a `KeyClass` is one key, also if it is a block. A field without one must be a block, whose keys have
    classes.
    """
    for name, field in block.model_fields.items():
        path = f"{prefix}{name}"
        key_class = own_class(field)
        inner = inner_block(field)
        if key_class is not None:
            yield Key(path=path, key_class=key_class, default=field.default)
        elif inner is not None:
            yield from iter_keys(inner, f"{path}.")
        else:
            raise AssertionError(f"expected {path} to be a block or to have a class, got {field.annotation}")


def inner_block(field: FieldInfo) -> type[Block] | None:
    """Return the block in a field's type: alone, in a list, or optional. None if the type has no block."""
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType, tuple) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, Block)), None)


def own_class(field: FieldInfo) -> KeyClass | None:
    """Return the `KeyClass` of a field; None for a block whose keys have classes."""
    return next((item for item in field.metadata if isinstance(item, KeyClass)), None)


def is_off(value: object, key_class: Unsupported) -> bool:
    """Return whether a value disables an unsupported key."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    # With == alone, 0 would equal False.
    return any(isinstance(value, bool) == isinstance(item, bool) and value == item for item in key_class.off)


def refused(sentence: str) -> PydanticCustomError:
    """Return an error for a pydantic validator, whose text is the key's path and `sentence`: "must be …, but is …"."""
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


def as_tuple(value: object) -> object:
    """Return a JSON list as a tuple, which strict validation needs. Other values are returned as they are."""
    return tuple(value) if isinstance(value, list) else value


def _refuse_bool(value: object) -> object:
    # pydantic's strict int still takes True for 1 in a union with float; a boolean is never a number here.
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _whole(value: object) -> object:
    # A JSON file may have 5e8 for 500000000, which Python reads as a float.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _or_never(value: object) -> object:
    # accelerate writes steps_per_print as JSON's Infinity.
    return 0 if isinstance(value, float) and value == float("inf") else value


def _dtype(value: object) -> object:
    name = str(value) if isinstance(value, torch.dtype) else value
    dtype = DTYPE_BY_NAME.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise refused(f"must be one of {', '.join(DTYPE_BY_NAME)}, but is {shown(value)}. Change the value.")
    return dtype


Number = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
"""A finite number. A boolean is not a number."""

_INT64 = Field(le=2**63 - 1)

Count = Annotated[int, Field(ge=0), _INT64]
"""A JSON integer from 0 on, of 64 bits."""

PositiveInt = Annotated[int, Field(ge=1), _INT64]
"""A JSON integer from 1 on, of 64 bits."""

Elements = Annotated[int, BeforeValidator(_whole), BeforeValidator(_refuse_bool), Field(ge=0), _INT64]
"""A number of elements: a whole number from 0 on, of 64 bits. May be written as 5e8, as in DeepSpeed's examples."""

Steps = Annotated[Elements, BeforeValidator(_or_never)]
"""A number of steps between two events: a whole number from 0 on, also as 2e3. 0 and infinity stand for never."""

Dtype = Annotated[torch.dtype, PlainValidator(_dtype), PlainSerializer(short_name)]
"""A dtype by any of DeepSpeed's names for it, with or without "torch."; written as "fp32", "bf16" or "fp16"."""

Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
"""A list of strings. A single string is an error."""
