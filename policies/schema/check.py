"""Checks a config against the schema."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from zeroamp.policies.errors import ConfigError
from zeroamp.policies.extensions import load
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import Block, inner_block


def known_part(cfg: Mapping[str, Any], block: type[Block] = Config) -> dict[str, Any]:
    """Return the config of a checkpoint without the keys that the version which saved it had, and this one has not."""
    known = {}
    for name, value in cfg.items():
        if name in block.model_fields:
            inner = inner_block(block.model_fields[name])
            known[name] = known_part(value, inner) if inner is not None and isinstance(value, dict) else value
    return known


def validate(cfg: Mapping[str, Any]) -> Config:
    """Return the config as typed blocks.

    Raises:
        ConfigError: keys are unknown, unsupported, or have values of another type. The text has a line for each of
            the first 20.
    """
    try:
        return Config.model_validate(dict(cfg))
    except ValidationError as error:
        raise ConfigError(load("validate.explain")(error, cfg)) from None
