"""Reads a config: a mapping, or a JSON file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.files import read_config_file

_DEEPEST = 16  # levels; the schema has four
_LARGEST = 2**63 - 1
_VALID = "a mapping, or the path of a JSON file"


def load_config(cfg: object) -> dict[str, Any]:
    """Return the config as a dict of JSON's own types that is the caller's own.

    Raises:
        ConfigError: it is neither, the file cannot be read, it has a key twice, or a value that JSON does not have.
    """
    if isinstance(cfg, Mapping):
        return json_object(cfg, "config")
    if isinstance(cfg, str) and cfg.lstrip().startswith("{"):
        raise ConfigError(describe("config", "the text of one", _VALID, "Call json.loads on it first."))
    if not isinstance(cfg, str | os.PathLike):
        raise ConfigError(describe("config", f"the {type(cfg).__name__} {cfg!r}", _VALID, "Pass one of them."))
    return json_object(read_config_file(Path(cfg)), "config")


def json_object(mapping: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Copy a mapping and what is in it, so that nothing the caller changes later changes what was read."""
    for key in mapping:
        if not isinstance(key, str) or "." in key or not key or not key.isprintable():
            raise ConfigError(
                f"{where} has the key {key!a}, but keys must be words without dots and control characters. Write the "
                "part after a dot as a key of an inner object."
            )
    prefix = "" if where == "config" else f"{where}."
    return {str(key): json_value(value, f"{prefix}{key}") for key, value in mapping.items()}


def json_value(value: Any, where: str) -> Any:
    """Copy one value of the config; NumPy's float64 is a float, an enum's member its value, a torch.dtype its name.

    Raises:
        ConfigError: it is nothing that JSON has, or beyond what a number or a text can be here.
    """
    if value is None or isinstance(value, bool):
        return value
    if where.count(".") > _DEEPEST:
        raise ConfigError(
            f"{where[:60]}... is nested more than {_DEEPEST} levels deep. The schema has four: correct it."
        )
    if isinstance(value, Mapping):
        return json_object(value, where)
    if isinstance(value, list | tuple):
        return [json_value(item, f"{where}.{index}") for index, item in enumerate(value)]
    if isinstance(value, int) and -_LARGEST - 1 <= value <= _LARGEST:
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str) and _is_text(value):
        return str.__str__(value)
    if isinstance(value, torch.dtype):
        return short_name(value)
    kind = "an integer of more than 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"
    kind = "a text that is no Unicode" if isinstance(value, str) else kind
    remedy = "Write a plain Python value; of NumPy and torch scalars, value.item()."
    raise ConfigError(describe(where, kind, "an object, list, text, number, true, false or null of JSON", remedy))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: it could not be printed in an error either
        return False
    return True


def flatten(cfg: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their path with dots; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in cfg.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested mappings that `flatten` would turn into `flat`."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *blocks, name = path.split(".")
        inner = nested
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[name] = value
    return nested
