"""The names of config keys: their paths, second names, and the arguments that stand for them."""

from collections.abc import Mapping
from typing import Any

from zeroamp.policies.errors import ConfigError, nearest, shown, some_of
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import Honoured, Native, iter_keys

OTHER_NAMES = {
    f"{key.path.rpartition('.')[0]}.{key.key_class.other_name}": key.path
    for key in iter_keys(Config)
    if isinstance(key.key_class, Honoured | Native) and key.key_class.other_name
}
"""Path of a key under its second name -> the path of the key."""


def rename_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flat`, {path: value}, with each second name of a key (`OTHER_NAMES`) replaced by its first name.

    Raises:
        ConfigError: the config has a key under both names, with different values.
    """
    renamed = {path: value for path, value in flat.items() if path not in OTHER_NAMES}
    for path in (path for path in flat if path in OTHER_NAMES):
        first = OTHER_NAMES[path]
        if renamed.setdefault(first, flat[path]) != flat[path]:
            raise ConfigError(
                f"{path} is {shown(flat[path])}, but {first}, another name of the same key, is {shown(flat[first])}. "
                "Remove one of them."
            )
    return renamed


def names_key(argument: str, path: str) -> bool:
    """Return whether an argument has the path of a key, under either of its names, or a short form of it."""
    others = (other for other, first in OTHER_NAMES.items() if first == path)
    return any(_is_name(argument, each) for each in (path, *others))


def _is_name(argument: str, path: str) -> bool:
    path_of_enabled, _, last = path.rpartition(".")
    if last == "enabled" and argument == path_of_enabled:
        return True
    return argument in (path, path.replace(".", "__")) or (argument == last and last != "enabled")


def path_of_key(name: str, value: object) -> str:
    """Return the path of the key with this name. If `value` is a block or None, `name` may be the name of a block.

    Raises:
        ConfigError: no key, or more than one, has the name.
    """
    keys = list(iter_keys(Config))
    paths = [key.path for key in keys]
    if value is None or isinstance(value, Mapping):  # of a block
        blocks = dict.fromkeys([*(path.rpartition(".")[0] for path in paths), *Config.model_fields])
        if named := [block for block in blocks if block and name in (block, block.rpartition(".")[2])]:
            return min(named, key=len)
    if name in paths:
        return name
    if name == "enabled":
        honoured = (key.path for key in keys if isinstance(key.key_class, Honoured))
        enabled = [path.removesuffix(".enabled") for path in honoured if path.endswith(".enabled")]
        raise ConfigError(f"enabled is a key of several blocks: {some_of(enabled)}. Name the block: bf16=True.")
    named = [key.path for key in keys if isinstance(key.key_class, Honoured) and names_key(name, key.path)]
    if len(named) > 1:
        raise ConfigError(f"{name} is the name of several keys: {some_of(named)}. Write the path of one.")
    if not named:
        hint = nearest(name, {path.rpartition(".")[2]: path for path in paths})
        hint = f"{hint} `zeroamp check --all` lists the keys.".lstrip()
        raise ConfigError(f"{name} is not a key of the config. {hint}")
    return named[0]
