"""What `optimizer` and `scheduler` share: the keys of `params` depend on the `type` beside them."""

import json
import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from zeroamp.policies.schema.keys import REMOVE_IT, Block, Number, Unsupported, is_off, nearest, own_class


def refused(found: str, valid: str, remedy: str) -> PydanticCustomError:
    """Build an error that carries the parts of `describe` in its context; the place is where it is raised."""
    context = {"found": found, "valid": valid, "remedy": remedy}
    return PydanticCustomError("refused", "{found}; valid: {valid}. {remedy}", context)


class ParamsBlock(Block):
    """The `params` of one type."""

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_unsupported(cls, value: object, info: ValidationInfo) -> object:
        key_class = own_class(cls.model_fields[str(info.field_name)])
        if not isinstance(key_class, Unsupported) or is_off(value, key_class):
            return value
        valid = " or ".join(json.dumps(off) for off in key_class.off)
        raise refused(f"{type(value).__name__} {value!r}", valid, key_class.note)


def typed_params(value: object, params: type[ParamsBlock]) -> ParamsBlock:
    """Check `value` against the block of its type; None is an empty block.

    Raises:
        ValidationError: with locations from the keys of `params` on. pydantic puts the keys above in front.
    """
    try:
        return params.model_validate({} if value is None else value)
    except ValidationError as error:
        lines = [_line(detail, params) for detail in error.errors()]
        raise ValidationError.from_exception_data(params.__name__, lines) from None


def _line(detail: Any, params: type[ParamsBlock]) -> InitErrorDetails:
    place, context = detail["loc"], detail.get("ctx", {})
    error: str | PydanticCustomError = detail["type"]
    if error == "refused":
        error = refused(**context)
    elif error == "extra_forbidden":
        # Outside this block nothing knows which keys its type has.
        hint = nearest(str(place[-1]), params.model_fields) or REMOVE_IT
        error = refused("a key that zeroamp does not support", ", ".join(sorted(params.model_fields)), hint)
    return InitErrorDetails(type=error, loc=place, input=detail["input"], ctx=context)


def _per_group(value: object) -> float | tuple[float, ...]:
    # Checked here and not by a union of types, whose members pydantic would write into the key's name.
    if isinstance(value, list | tuple) and value:
        return tuple(_not_negative(item) for item in value)
    return _not_negative(value)


def _not_negative(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    raise ValueError("a number from 0 on, or a list with one such number per param group")


def _fractions(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
    if any(item >= 1 for item in (value if isinstance(value, tuple) else (value,))):
        raise ValueError("a number from 0 to below 1, or a list with one such number per param group")
    return value


PositiveInt = Annotated[int, Field(ge=1)]
"""A whole number from 1 on, written as one."""

NotNegative = Annotated[Number, Field(ge=0)]
"""A number from 0 on."""

PerGroup = Annotated[float | tuple[float, ...], BeforeValidator(_per_group)]
"""A number from 0 on; or a JSON list with one for each param group of the optimizer."""

MomentumPerGroup = Annotated[PerGroup, AfterValidator(_fractions)]
"""The same, below 1."""
