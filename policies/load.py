"""Reads a config: a mapping, or a JSON file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroamp.policies.errors import ConfigError, describe

_VALID = "a mapping, or the path of a JSON file"


def load_config(cfg: object) -> dict[str, Any]:
    """Return the config as a dict that is the caller's own.

    Raises:
        ConfigError: it is neither, the file cannot be read, or it has a key twice.
    """
    if isinstance(cfg, Mapping):
        return _copy(cfg, "config")
    if isinstance(cfg, str) and cfg.lstrip().startswith("{"):
        raise ConfigError(describe("config", "a string of JSON", _VALID, "Call json.loads on it first."))
    if not isinstance(cfg, str | os.PathLike):
        raise ConfigError(describe("config", f"{type(cfg).__name__} {cfg!r}", _VALID, "Pass one of them."))
    path = Path(cfg)
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
    except OSError as error:
        found = f"no readable file at {str(path)!r} ({error})"
        raise ConfigError(describe("config", found, "the path of a JSON file", "Check the path.")) from error
    except ValueError as error:  # not JSON, or not UTF-8
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(describe("config", f"{str(path)!r}: {error}", "a JSON object", "Mend the file.")) from error
    if not isinstance(loaded, dict):
        found = f"{str(path)!r}: {type(loaded).__name__}"
        raise ConfigError(describe("config", found, "a JSON object", "Mend the file."))
    return _copy(loaded, "config")


def _copy(mapping: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Copy a mapping and those inside it, so that nothing the caller changes later changes what was read."""
    for key in mapping:
        if not isinstance(key, str) or "." in key or not key:
            remedy = "Write an object in an object for what has a dot."
            raise ConfigError(describe(where, f"the key {key!r}", "keys that are words without dots", remedy))
    return {key: _copy(value, key) if isinstance(value, Mapping) else value for key, value in mapping.items()}


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(describe(key, "the key twice in one JSON object", "each key once", "Remove one of them."))
    return dict(pairs)


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
