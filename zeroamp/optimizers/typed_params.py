"""Checks that `optimizer` and `scheduler` share: the keys of their `params` depend on their `type`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from zeroamp.policies.errors import nearest, shown
from zeroamp.policies.numbers import is_finite
from zeroamp.policies.schema.keys import REMOVE_IT, Block, Number, refused

LARGEST = 1e15
"""Largest learning rate, ratio or number of steps, so that products and quotients of two of them are finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedParams:
    """The types of the block `optimizer` or `scheduler`, and the keys that `params` has for each of them."""

    blocks: Mapping[str, type[Block]]
    """Type that zeroamp builds -> its block of `params`."""
    build_it: str
    """What to do for other types, as a sentence."""

    def known_type(self, value: object) -> str:
        """Return a `type` in the spelling of `blocks`. Upper and lower case are not distinguished.

        Raises:
            PydanticCustomError: zeroamp does not build this type.
        """
        by_lower = {name.lower(): name for name in self.blocks}
        valid = f"must be one of {', '.join(self.blocks)}, but is {shown(value)}"
        if not isinstance(value, str):
            raise refused(f"{valid}. Name one of them.")
        if value.lower() in by_lower:
            return by_lower[value.lower()]
        raise refused(" ".join(filter(None, (f"{valid}.", nearest(value, self.blocks), self.build_it))))

    def params_of(self, name: str, value: object) -> Block:
        """Return `value` as the block of the type `name`. None stands for an empty block.

        Raises:
            ValidationError: with locations that begin with keys of `params`. pydantic adds the path of `params`.
        """
        params = self.blocks[name]
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
        # The text is made here, because only this function has the keys of the type.
        hint = nearest(str(place[-1]), params.model_fields) or REMOVE_IT
        known = ", ".join(sorted(params.model_fields))
        error = refused(f"is not supported by zeroamp with this type. {hint} Its keys are {known}.")
    return InitErrorDetails(type=error, loc=place, input=detail["input"], ctx=context)


def _per_group(value: object) -> float | tuple[float, ...]:
    # Checked here, because pydantic would add the members of a union of types to the key's path.
    items = value if isinstance(value, list | tuple) and value else [value]
    numbers = tuple(float(item) for item in items if is_finite(item) and 0 <= item <= LARGEST)
    if len(numbers) < len(items):
        raise ValueError("a number from 0 to 1e15, or a list with one such number per param group")
    return numbers if items is value else numbers[0]


NotNegative = Annotated[Number, Field(ge=0, le=LARGEST)]
"""A number from 0 to `LARGEST`."""

PerGroup = Annotated[float | tuple[float, ...], BeforeValidator(_per_group)]
"""A number from 0 to `LARGEST`, or a JSON list with one such number per param group of the optimizer."""
