"""Writes a policy as a config, and as a short config."""

from typing import TYPE_CHECKING, Any

from zeroamp.policies.errors import ConfigError
from zeroamp.policies.json_values import flatten, nest
from zeroamp.policies.normalise import unread
from zeroamp.policies.schema import Config, Honoured, Native, iter_keys, validate

if TYPE_CHECKING:
    from zeroamp.policies.policy import Policy


def to_config(policy: "Policy") -> dict[str, Any]:
    """Return a config, with defaults written out, from which `policy_from_config` makes an equal policy.

    Native keys that were given are included. Keys without effect, such as those of a block that is off, are not.
    """
    given, held = dict(policy.given), policy.config.model_dump(mode="json", exclude_none=True)
    flat: dict[str, Any] = {}
    for key in iter_keys(Config):
        if isinstance(key.key_class, Native) and key.path in given:
            flat[key.path] = given[key.path]
        elif isinstance(key.key_class, Honoured) and unread(key.path, policy.config) is None:
            value = _at(key.path, held)
            flat |= {} if value is None else {key.path: value}
    return nest(flat)


def short_config(policy: "Policy") -> dict[str, Any]:
    """Return the part of `to_config` that differs from the defaults, if it makes an equal policy; else all of it."""
    whole = to_config(policy)
    usual = {key.path: key.default for key in iter_keys(Config)} | flatten(to_config(type(policy)()))
    short = nest({path: value for path, value in flatten(whole).items() if path not in usual or usual[path] != value})
    try:
        return short if type(policy)(validate(short)) == policy else whole
    except ConfigError:
        return whole


def _at(path: str, cfg: Any) -> Any:
    for part in path.split("."):
        cfg = cfg.get(part) if cfg is not None else None
    return cfg
