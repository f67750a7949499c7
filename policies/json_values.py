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
    """Return a config, a mapping or the path of a JSON file, as a new dict of JSON's types.

    Raises:
        ConfigError: `cfg` has another type, the file cannot be read, a key occurs twice, or a value has a type that
            JSON does not have.
    """
    if isinstance(cfg, Mapping):
        return json_object(cfg, "config")
    if isinstance(cfg, str) and cfg.lstrip().startswith("{"):
        raise ConfigError(describe("config", "the JSON text itself", _VALID, "Call json.loads on it first."))
    if not isinstance(cfg, str | os.PathLike):
        raise ConfigError(describe("config", f"the {type(cfg).__name__} {cfg!r}", _VALID, "Pass one of these two."))
    return json_object(read_config_file(Path(cfg)), "config")


def json_object(mapping: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return a deep copy of a mapping as JSON's types, which later changes of the caller's mapping do not change.

    Raises:
        ConfigError: a key is not a word without dots, or a value has a type that JSON does not have.
    """
    for key in mapping:
        if not isinstance(key, str) or "." in key or not key or not key.isprintable():
            raise ConfigError(
                f"{where} has the key {key!a}, but keys must be words without dots and control characters. Write the "
                "part after a dot as a key of an inner object."
            )
    prefix = "" if where == "config" else f"{where}."
    return {str(key): json_value(value, f"{prefix}{key}") for key, value in mapping.items()}


def json_value(value: Any, where: str) -> Any:
    """Return a copy of one value of the config as JSON's types.

    NumPy's float64 becomes a float, an enum's member its value, and a torch.dtype its short name.

    Raises:
        ConfigError: the value has a type that JSON does not have, is an integer of more than 64 bits, a text that is
            not valid Unicode, or is nested too deeply.
    """
    if value is None or isinstance(value, bool):
        return value
    if where.count(".") > _DEEPEST:
        raise ConfigError(
            f"{where[:60]}... is nested more than {_DEEPEST} levels deep. The schema has four levels. Correct the "
            "config."
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
    kind = "a text that is not valid Unicode" if isinstance(value, str) else kind
    remedy = "Write a plain Python value; for NumPy and torch scalars, value.item()."
    raise ConfigError(describe(where, kind, "an object, list, text, number, true, false or null of JSON", remedy))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which an error could not print either
        return False
    return True


def flatten(cfg: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {path with dots: value} of nested mappings. An empty mapping counts as a value."""
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
