"""What `optimizer` and `scheduler` share: the keys of `params` depend on the `type` beside them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from zeroamp.policies.errors import shown
from zeroamp.policies.numbers import is_finite
from zeroamp.policies.schema.keys import REMOVE_IT, Block, Number, nearest, refused

LARGEST = 1e15
"""Largest learning rate, ratio or number of steps: products and quotients of two of them are finite."""


def typed_params(value: object, params: type[Block]) -> Block:
    """Check `value` against the block of its type; None is an empty block.

    Raises:
        ValidationError: with locations from the keys of `params` on. pydantic puts the keys above in front.
    """
    try:
        return params.model_validate({} if value is None else value)
    except ValidationError as error:
        lines = [_line(detail, params) for detail in error.errors()]
        raise ValidationError.from_exception_data(params.__name__, lines) from None


def _line(detail: Any, params: type[Block]) -> InitErrorDetails:
    place, context = detail["loc"], detail.get("ctx", {})
    error: str | PydanticCustomError = detail["type"]
    if error == "refused":
        error = refused(**context)
    elif error == "extra_forbidden":
        # Outside this block nothing knows which keys its type has.
        hint = nearest(str(place[-1]), params.model_fields) or REMOVE_IT
        known = ", ".join(sorted(params.model_fields))
        error = refused(f"is not supported by zeroamp with this type. {hint} Its keys are {known}.")
    return InitErrorDetails(type=error, loc=place, input=detail["input"], ctx=context)


def known_type(value: object, known: Mapping[str, type[Block]], others: set[str], build_it: str) -> str:
    """Return the `type` in the spelling of `known`, whatever its case.

    Raises:
        PydanticCustomError: zeroamp builds none of that name. `others` are names that exist elsewhere.
    """
    by_lower = {name.lower(): name for name in known}
    valid = f"must be one of {', '.join(known)}, but is {shown(value)}"
    if not isinstance(value, str):
        raise refused(f"{valid}. Name one of them.")
    if value.lower() in by_lower:
        return by_lower[value.lower()]
    if value.lower() in {name.lower() for name in others}:
        raise refused(f"{valid}, which zeroamp does not build. {build_it}")
    raise refused(f"{valid}. {nearest(value, known) or build_it}")


def _per_group(value: object) -> float | tuple[float, ...]:
    # Checked here and not by a union of types, whose members pydantic would write into the key's name.
    items = value if isinstance(value, list | tuple) and value else [value]
    numbers = tuple(float(item) for item in items if is_finite(item) and 0 <= item <= LARGEST)
    if len(numbers) < len(items):
        raise ValueError("a number from 0 to 1e15, or a list with one such number per param group")
    return numbers if items is value else numbers[0]


def _fractions(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
    if any(item >= 1 for item in (value if isinstance(value, tuple) else (value,))):
        raise ValueError("a number from 0 to below 1, or a list with one such number per param group")
    return value


NotNegative = Annotated[Number, Field(ge=0, le=LARGEST)]
"""A number from 0 on, up to `LARGEST`."""

PerGroup = Annotated[float | tuple[float, ...], BeforeValidator(_per_group)]
"""A number from 0 on; or a JSON list with one for each param group of the optimizer."""

MomentumPerGroup = Annotated[PerGroup, AfterValidator(_fractions)]
"""The same, below 1."""
