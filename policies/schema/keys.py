"""What every config key is to zeroamp: honoured, native or unsupported. There is no fourth class."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

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
REMOVE_IT = "Remove it: zeroamp refuses what it would otherwise ignore."


@dataclass(frozen=True, slots=True)
class Honoured:
    """The key has the effect that its note describes."""

    note: str
    """What it does, where that is not plain from its name or differs from DeepSpeed."""
    deepspeed_default: Any = SAME
    """DeepSpeed 0.19.8's default, where ours is another."""
    other_name: str | None = None
    """A second name of the key, in the same block. `rename_keys` replaces it."""


@dataclass(frozen=True, slots=True)
class Native:
    """The key is accepted and changes nothing: FSDP2 or zeroamp always does it, or has nothing there to tune."""

    note: str
    """Why it changes nothing."""
    other_name: str | None = None
    """A second name of the key, in the same block. `rename_keys` replaces it."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The key is refused, except with a value that asks for nothing."""

    note: str
    """What to do instead, as a sentence."""
    off: tuple[Any, ...] = (None, False)
    """The values that ask for nothing."""


KeyClass = Honoured | Native | Unsupported


class Block(BaseModel):
    """A JSON object of the config. Unknown keys are errors, values are never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

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
    """One key of the schema: its path, its class with the note that the docs print, and its default."""

    path: str
    """With dots: "zero_optimization.stage"."""
    key_class: KeyClass
    default: Any
    """What its absence means; pydantic's `PydanticUndefined` where the key must be given."""


def iter_keys(block: type[Block], prefix: str = "") -> Iterator[Key]:
    """Yield every key of a block and of the blocks in it.

    A field without a class of its own must be a block, whose keys have them. A block with one is a key as a whole.
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
    """Return the block that a field holds, whether it may be None or a list of them; None if it holds none."""
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType, tuple) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, Block)), None)


def own_class(field: FieldInfo) -> KeyClass | None:
    """Return the class of a field as a whole; None for a block, whose keys have classes."""
    return next((item for item in field.metadata if isinstance(item, KeyClass)), None)


def is_off(value: object, key_class: Unsupported) -> bool:
    """Return whether the value of an unsupported key asks for nothing."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    # == alone would take 0 for False.
    return any(isinstance(value, bool) == isinstance(item, bool) and value == item for item in key_class.off)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the question whether another name was meant, case aside; an empty text if none is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"Did you mean {by_lower[near[0]]!r}?" if near else ""


def refused(sentence: str) -> PydanticCustomError:
    """Build the error of a key whose text is its path and then `sentence`, as in "must be above 0, but is -1. …"."""
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


def as_tuple(value: object) -> object:
    """Return a JSON list as a tuple: fields are hashable, and strict validation takes no list for a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _refuse_bool(value: object) -> object:
    # pydantic's strict int still takes True for 1 in a union with float; a boolean is never a number here.
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _whole(value: object) -> object:
    # JSON written by Python has 5e8 for 500000000: a whole number all the same.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _or_never(value: object) -> object:
    # accelerate writes steps_per_print as JSON's Infinity.
    return 0 if isinstance(value, float) and value == float("inf") else value


def _dtype(value: object) -> torch.dtype:
    if isinstance(value, torch.dtype) and value in DTYPE_BY_NAME.values():
        return value
    if isinstance(value, str) and value.removeprefix("torch.") in DTYPE_BY_NAME:
        return DTYPE_BY_NAME[value.removeprefix("torch.")]
    raise refused(f"must be one of {', '.join(DTYPE_BY_NAME)}, but is {shown(value)}. Change the value.")


Number = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
"""A finite number; a boolean is none."""

Count = Annotated[int, Field(ge=0)]
"""A whole number from 0 on, written as one."""

PositiveInt = Annotated[int, Field(ge=1)]
"""A whole number from 1 on, written as one."""

Elements = Annotated[int, BeforeValidator(_whole), BeforeValidator(_refuse_bool), Field(ge=0, le=2**63 - 1)]
"""A number of elements: whole, from 0 on, of 64 bits; 5e8 is one too, as DeepSpeed's examples write it."""

Steps = Annotated[int, BeforeValidator(_or_never), BeforeValidator(_whole), BeforeValidator(_refuse_bool), Field(ge=0)]
"""A number of steps between two events: whole, from 0 on, 2e3 too. 0 and infinity are never."""

Dtype = Annotated[torch.dtype, PlainValidator(_dtype), PlainSerializer(short_name)]
"""A dtype by any of DeepSpeed's names for it, with or without "torch."; written as "fp32", "bf16" or "fp16"."""

Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
"""A list of strings; one string is not taken for a list of its characters."""
