"""Reads a config: a mapping, or a JSON file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, describe, repr_on_all_ranks

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
        raise ConfigError(
            describe("config", f"the {type(cfg).__name__} {repr_on_all_ranks(cfg)}", _VALID, "Pass one of these two.")
        )
    return json_object(_read_file(Path(cfg)), "config")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once_each)
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read ({error}). Check the path of the file.") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a key twice, or nested too deeply
        hint = _hint(path, error)
        raise ConfigError(f"config {str(path)!r} must contain a JSON object: {error}. {hint}") from error
    if not isinstance(loaded, dict):
        found = type(loaded).__name__
        raise ConfigError(f"config {str(path)!r} must contain a JSON object, but contains a {found}. Correct the file.")
    return loaded


def _hint(path: Path, error: Exception) -> str:
    """Return what to do about a file that is not JSON. YAML and comments are the most common mistakes."""
    if not isinstance(error, json.JSONDecodeError):
        return "Correct the file."
    if error.doc[error.pos :].lstrip().startswith(("//", "/*", "#")):
        return "JSON has no comments. Remove them."
    if path.suffix in (".yaml", ".yml"):
        return "This file is YAML. Write it as JSON, or load it in Python and pass the dict."
    return "Correct the file."


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict, for `object_pairs_hook`; raise ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"the key {twice} occurs twice in one JSON object")
    return content


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
        ConfigError: the value has a type that JSON does not have.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return json_object(value, where)
    if isinstance(value, list | tuple):
        return [json_value(item, f"{where}.{index}") for index, item in enumerate(value)]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, torch.dtype):
        return short_name(value)
    remedy = "Write a plain Python value; for NumPy and torch scalars, value.item()."
    valid = "an object, list, text, number, true, false or null of JSON"
    raise ConfigError(describe(where, f"a {type(value).__name__}", valid, remedy))


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
