"""Fills the values that a config leaves `"auto"`, as accelerate and transformers do for DeepSpeed."""

from collections.abc import Callable, Mapping
from typing import Any

from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.load import flatten, json_value, nest

AUTO = "auto"

OWN_AUTO = ("torch_autocast.lower_precision_safe_modules", "data_types.keep_in_fp32_modules")
"""Keys to which "auto" is a value of its own."""

_ZERO = "zero_optimization"
DERIVED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "hidden_size": {
        f"{_ZERO}.reduce_bucket_size": lambda width: width * width,
        f"{_ZERO}.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
        f"{_ZERO}.stage3_param_persistence_threshold": lambda width: 10 * width,
    },
    "lr": {"scheduler.params.warmup_max_lr": lambda lr: lr},
}
"""Arguments that fill keys of other names: transformers' rules for its own arguments."""


def fill_auto(cfg: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `cfg` with each "auto" replaced by the argument of its name.

    An argument is named by the key's path with dots (or with `__` for each dot), by its last part, or, for
    `block.enabled`, by the block. It fills every "auto" that it names. One that names a key with another value must
    agree with it.

    Raises:
        ConfigError: an "auto" is left, or an argument names no key of the config or disagrees with one.
    """
    flat = flatten(cfg)
    filled = dict(flat)
    for name, given in arguments.items():
        value = json_value(given, f"the argument {name}")
        paths = [path for path in flat if _names(name, path)]
        derived = {path: rule for path, rule in DERIVED.get(name, {}).items() if flat.get(path) == AUTO}
        if not paths and not derived:
            raise ConfigError(_no_such_key(name, value, flat))
        for path in paths:
            if _is_open(path, flat):
                filled[path] = value
            elif flat[path] != value or isinstance(flat[path], bool) != isinstance(value, bool):
                found = f"{flat[path]!r} beside the argument {name}={value!r}"
                raise ConfigError(describe(path, found, 'one value, or "auto" in the config', "Remove one of them."))
        for path, rule in derived.items():
            if filled[path] == AUTO:
                filled[path] = _derive(rule, name, value)
    if left := [path for path in flat if _is_open(path, flat) and filled[path] == AUTO]:
        raise ConfigError("\n".join(_left(path) for path in left))
    return nest(filled)


def _is_open(path: str, flat: Mapping[str, Any]) -> bool:
    return isinstance(flat[path], str) and flat[path] == AUTO and path not in OWN_AUTO


def _names(argument: str, path: str) -> bool:
    path_of_enabled, _, last = path.rpartition(".")
    if last == "enabled" and argument == path_of_enabled:
        return True
    return argument in (path, path.replace(".", "__")) or (argument == last and last != "enabled")


def _left(path: str) -> str:
    block, _, last = path.rpartition(".")
    name = block.replace(".", "__") if last == "enabled" else last
    remedy = f"Pass it: policy_from_config(cfg, {name}=...), or --auto {name}=... on the command line."
    return describe(path, '"auto" and no argument that fills it', "a value", remedy)


def _derive(rule: Callable[[Any], Any], name: str, value: Any) -> Any:
    is_size = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**24
    if name == "hidden_size" and not is_size:
        found = f"{type(value).__name__} {value!r}"
        raise ConfigError(describe(f"the argument {name}", found, "a width, a whole number", "Pass the model's own."))
    return rule(value)


def _no_such_key(name: str, value: object, flat: Mapping[str, Any]) -> str:
    opened = [path for path in flat if _is_open(path, flat)]
    return describe(
        f"the argument {name}",
        f"{value!r}, which fills no key of the config",
        ", ".join(opened) or 'arguments for keys that are "auto" in the config, which none is',
        f'Write "auto" as the value of {name} in the config, or leave the argument out.',
    )
