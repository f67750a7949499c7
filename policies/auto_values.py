"""Fills the values that a config leaves `"auto"` with keyword arguments, as accelerate and transformers do."""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from zeroamp.policies.errors import ConfigError, describe, shown, some_of
from zeroamp.policies.json_values import flatten, json_value, load_config, nest
from zeroamp.policies.key_names import names_key, rename_keys
from zeroamp.policies.numbers import is_integer

AUTO = "auto"

OWN_AUTO = (
    "torch_autocast.lower_precision_safe_modules",
    "data_types.keep_in_fp32_modules",
    "zeroamp.shard_dim",
    "zeroamp.ranks_per_node",
)
"""Keys for which "auto" is a valid value, which no argument replaces."""

_ZERO = "zero_optimization"
DERIVED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "hidden_size": {
        f"{_ZERO}.reduce_bucket_size": lambda width: width * width,
        f"{_ZERO}.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
        f"{_ZERO}.stage3_param_persistence_threshold": lambda width: 10 * width,
    },
    "lr": {"scheduler.params.warmup_max_lr": lambda lr: lr},
}
"""Name of an argument -> {key that it fills: rule}. The rules are those of transformers' integration of DeepSpeed."""


def open_auto_keys(cfg: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, tuple[str, ...]]:
    """Return the keys of a config that are "auto" and need an argument of `policy_from_config`.

    Pass only these arguments: one that fills no key is an error. A loader that has many values selects them like this:

    ```python
    known = {"bf16": True, "gradient_clipping": 1.0, "hidden_size": model.config.hidden_size}
    wanted = {name for names in zeroamp.open_auto_keys(cfg).values() for name in names}
    policy = zeroamp.policy_from_config(cfg, **{name: known[name] for name in known if name in wanted})
    ```

    Args:
        cfg: a mapping, or the path of a JSON file.

    Returns:
        Path of each such key, with dots -> the names of the arguments that fill it: the path itself, the short name,
        and the arguments from which it can be derived ("hidden_size", "lr").

    Raises:
        ConfigError: the config cannot be read. Its values are not checked here.
    """
    flat = rename_keys(flatten(load_config(cfg)))
    derived = {path: [name for name, rules in DERIVED.items() if path in rules] for path in flat}
    return {path: (path, _short_name(path), *derived[path]) for path in flat if _is_open(path, flat)}


def without_open_keys(cfg: Mapping[str, Any] | str | os.PathLike[str], filled: Collection[str] = ()) -> dict[str, Any]:
    """Return a config without the keys that are "auto", so that its errors are found before they have values.

    `filled`: names of the arguments that will fill keys, which stay.

    A block `optimizer` or `scheduler` with such a key is left out.
    """
    left = [path for path, names in open_auto_keys(cfg).items() if not set(names) & set(filled)]
    blocks = tuple(f"{path.split('.')[0]}." for path in left if path.startswith(("optimizer.", "scheduler.")))
    flat = rename_keys(flatten(load_config(cfg)))
    return nest({path: value for path, value in flat.items() if path not in left and not path.startswith(blocks)})


def _short_name(path: str) -> str:
    block, _, last = path.rpartition(".")
    return block.replace(".", "__") if last == "enabled" else last


def fill_auto(flat: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flat`, {path: value}, with each "auto" replaced by the argument of its name.

    The name of an argument is the key's path with dots (or with `__` for each dot), the path's last part, or, for
    `block.enabled`, the block. An argument fills every "auto" that it names. If a key that it names is not "auto", the
    value of the key and the argument must be equal.

    Raises:
        ConfigError: an "auto" is not filled, or an argument names no key of the config or differs from the value of
            one.
    """
    filled = dict(flat)
    for name, given in arguments.items():
        value = json_value(given, f"the argument {name}")
        paths = [path for path in flat if names_key(name, path)]
        derived = {path: rule for path, rule in DERIVED.get(name, {}).items() if flat.get(path) == AUTO}
        if not paths and not derived:
            opened = [path for path in flat if _is_open(path, flat)]
            raise ConfigError(
                f"the argument {name} is {shown(value)}, but fills no key of the config. Leave it out, or write "
                f'"auto" as the value of the key {name}. Keys that are "auto": {some_of(opened) or "none"}.'
            )
        for path in paths:
            if _is_open(path, flat):
                filled[path] = value
            elif flat[path] != value or isinstance(flat[path], bool) != isinstance(value, bool):
                raise ConfigError(
                    f"{path} is {shown(flat[path])} in the config, but the argument {name} is {shown(value)}. "
                    'Remove one of them, or write "auto" in the config.'
                )
        for path, rule in derived.items():
            if filled[path] == AUTO:
                filled[path] = _derive(rule, name, value)
    if left := [path for path in flat if _is_open(path, flat) and filled[path] == AUTO]:
        raise ConfigError("\n".join(_left(path) for path in left))
    return filled


def _is_open(path: str, flat: Mapping[str, Any]) -> bool:
    return isinstance(flat[path], str) and flat[path] == AUTO and path not in OWN_AUTO


def _left(path: str) -> str:
    name = _short_name(path)
    return (
        f'{path} is "auto", but no argument fills it. '
        f"Pass a value: policy_from_config(cfg, {name}=...), or --auto {name}=... on the command line."
    )


def _derive(rule: Callable[[Any], Any], name: str, value: Any) -> Any:
    if name == "hidden_size" and not (is_integer(value, at_least=1) and value < 2**24):
        valid = "a whole number from 1 to 16,777,215"
        raise ConfigError(describe(f"the argument {name}", shown(value), valid, "Pass the model's hidden size."))
    return rule(value)
