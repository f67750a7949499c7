"""Reads a config into frozen values. Does not use `torch.distributed`.

A name is imported when it is first used, as in `zeroamp`. `errors`, `files`, `schema` and `tables` can be imported
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroamp.policies.auto_values import open_auto_keys as open_auto_keys
    from zeroamp.policies.auto_wrap import AutoWrapPolicy as AutoWrapPolicy
    from zeroamp.policies.auto_wrap import find_units as find_units
    from zeroamp.policies.errors import ConfigError as ConfigError
    from zeroamp.policies.errors import PrecisionError as PrecisionError
    from zeroamp.policies.errors import StepError as StepError
    from zeroamp.policies.errors import WrapError as WrapError
    from zeroamp.policies.errors import ZeroAmpError as ZeroAmpError
    from zeroamp.policies.policy import Policy as Policy
    from zeroamp.policies.policy import policy_from_config as policy_from_config

_HOMES = {
    "AutoWrapPolicy": "auto_wrap",
    "ConfigError": "errors",
    "Policy": "policy",
    "PrecisionError": "errors",
    "StepError": "errors",
    "WrapError": "errors",
    "ZeroAmpError": "errors",
    "find_units": "auto_wrap",
    "open_auto_keys": "auto_values",
    "policy_from_config": "policy",
}
"""Public name -> the module of this package that defines it."""

__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}", name=name, obj=import_module(__name__)
            )
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
