"""Adds the keys of `foreign_keys.toml` to the schema: DeepSpeed's keys that are native or unsupported."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, create_model

from zeroamp.policies.schema.keys import Block, Native, Unsupported

_B = TypeVar("_B", bound=Block)


def _read() -> dict[str, Native | Unsupported]:
    tables = tomllib.loads(Path(__file__).with_name("foreign_keys.toml").read_text(encoding="utf-8"))
    others, accepted = tables["other_names"], tables["accepted"]
    return {
        **{path: Native(note, others.get(path)) for path, note in tables["native"].items()},
        **{
            path: Unsupported(note, (None, *accepted.get(path, [False])))
            for path, note in tables["unsupported"].items()
        },
    }


FOREIGN = _read()
"""Path of a key, with dots -> its class."""


def with_foreign_keys(path: str) -> Callable[[type[_B]], type[_B]]:
    """Return a class decorator that adds the foreign keys of the block at `path` ("" for the top level)."""
    return lambda block: _extended(block, f"{path}." if path else "")


def _extended(block: type[_B], prefix: str) -> type[_B]:
    fields: dict[str, Any] = {}
    for name in (path.removeprefix(prefix).partition(".")[0] for path in FOREIGN if path.startswith(prefix)):
        if name in block.model_fields:  # a block with keys of its own, which is decorated itself
            continue
        key_class = FOREIGN.get(f"{prefix}{name}")
        fields[name] = (_foreign_block(f"{prefix}{name}.") if key_class is None else Annotated[object, key_class], None)
    return create_model(block.__name__, __base__=block, __module__=block.__module__, __doc__=block.__doc__, **fields)


def _foreign_block(prefix: str) -> Any:
    """Return the type of a block without keys of zeroamp: its keys are checked, and its value becomes None."""
    return Annotated[_extended(Block, prefix) | None, AfterValidator(lambda _: None)]
