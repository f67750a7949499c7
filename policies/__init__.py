"""Frozen values, read from a config. Nothing here touches `torch.distributed`."""

from zeroamp.policies.auto_values import open_auto_keys
from zeroamp.policies.auto_wrap import AutoWrapPolicy, find_units
from zeroamp.policies.errors import ConfigError, PrecisionError, StepError, WrapError, ZeroAmpError
from zeroamp.policies.policy import Policy, policy_from_config

__all__ = [
    "AutoWrapPolicy",
    "ConfigError",
    "Policy",
    "PrecisionError",
    "StepError",
    "WrapError",
    "ZeroAmpError",
    "find_units",
    "open_auto_keys",
    "policy_from_config",
]
