"""Refuses arguments of `accelerate.Accelerator`, and calls of `prepare`, that contradict zeroamp or its config.

Environment variables that accelerate reads count as arguments: `accelerate launch` passes its options in them.
"""

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

from zeroamp.integrations.config_values import PRECISIONS, ConfigOrPolicy, Precision
from zeroamp.optimizers.from_config import optimizer_from_config
from zeroamp.optimizers.schedulers import CurveLR
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy

CONFIG_VARIABLE = "ZEROAMP_CONFIG"
"""The environment variable with the path of the config, if a script does not pass `zeroamp=`."""

_PLUGINS = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
"""Argument for another way to shard -> the environment variable that enables it."""
_HANDLERS = {
    "GradScalerKwargs": "TrainStep scales the loss. Set fp16.initial_scale_power and its like in the config.",
    "AutocastKwargs": (
        "the config decides autocast. For a block in fp32, pass it to accelerator.autocast(autocast_handler=...)."
    ),
}
"""Class of a handler in `kwargs_handlers` that would have no effect -> the reason."""


def bound_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Accelerator(*args, **kwargs)` by name.

    Raises:
        TypeError: `Accelerator` has no such argument.
    """
    bound = inspect.signature(Accelerator.__init__).bind(None, *args, **kwargs)
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def config_or_environment(config: ConfigOrPolicy | None) -> ConfigOrPolicy:
    """Return the config that was passed, or the path in `ZEROAMP_CONFIG`.

    Raises:
        ConfigError: neither is given.
    """
    found = config if config is not None else os.environ.get(CONFIG_VARIABLE)
    if found in (None, ""):
        raise ConfigError(
            f"ZeroampAccelerator has no config. Pass zeroamp=, the path of a JSON file, a mapping or a Policy, or set "
            f"the environment variable {CONFIG_VARIABLE} to a path."
        )
    return found


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments and environment variables that select another way to shard or scale the loss."""
    for name, variable in _PLUGINS.items():
        what = name if given.get(name) is not None else None
        if what is None and os.environ.get(variable, "").lower() in ("true", "1"):
            what = f"the environment variable {variable}"
        if what is not None:
            raise ConfigError(
                f"ZeroampAccelerator got {what}, but zeroamp shards the model itself. Remove it, and set "
                "zero_optimization.stage in the config of zeroamp=."
            )
    for handler in given.get("kwargs_handlers") or ():
        if (name := type(handler).__name__) in _HANDLERS:
            raise ConfigError(f"kwargs_handlers has {name}, but {_HANDLERS[name]}")


def asked_precision(argument: object) -> Precision | None:
    """Return accelerate's mixed precision: the argument, else the environment variable. None: neither is set.

    "no" in the environment counts as not set, since `accelerate launch` always sets the variable.

    Raises:
        ConfigError: zeroamp does not have the precision.
    """
    asked = str(argument) if argument is not None else os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    precision = next((name for name in PRECISIONS.values() if name == asked), None)
    if precision is None:
        raise ConfigError(f'mixed_precision must be "no", "bf16" or "fp16" with zeroamp, but is "{asked}".')
    return None if argument is None and precision == "no" else precision


def refuse_dummies(args: Iterable[object]) -> None:
    """Raise ConfigError for accelerate's placeholders of an optimizer and a scheduler that an engine builds."""
    for each in args:
        if isinstance(each, DummyOptim | DummyScheduler):
            raise ConfigError(
                f"accelerator.prepare was given a {type(each).__name__}. Prepare the model first, then build: "
                "optimizer = zeroamp.optimizer_from_config(accelerator.policy, model.parameters()), scheduler = "
                "zeroamp.scheduler_from_config(accelerator.policy, optimizer), and prepare both."
            )


def refuse_other_optimizers(policy: Policy, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise ConfigError if the config has an `optimizer` block, but an optimizer has another class or defaults."""
    if policy.optimizer is None:
        return
    wanted = optimizer_from_config(policy, [torch.zeros(1)])
    for optimizer in optimizers:
        keys = [key for key, value in wanted.defaults.items() if optimizer.defaults.get(key) != value]
        if type(optimizer) is not type(wanted) or keys:
            what = f" with another {', '.join(keys)}" if keys else ""
            raise ConfigError(
                f"optimizer.type is {type(wanted).__name__} in the config, but the prepared optimizer is "
                f"{type(optimizer).__name__}{what}. Remove the block, or build the optimizer by "
                "zeroamp.optimizer_from_config(accelerator.policy, model.parameters())."
            )


def refuse_other_scheduler(policy: Policy, scheduler: object) -> None:
    """Raise ConfigError if the config has a `scheduler` block, but the scheduler was not built from it."""
    if policy.scheduler is not None and not isinstance(scheduler, CurveLR):
        raise ConfigError(
            f"scheduler.type is {policy.scheduler.type} in the config, but the prepared scheduler is "
            f"{type(scheduler).__name__}. Remove the block, or build the scheduler by "
            "zeroamp.scheduler_from_config(accelerator.policy, optimizer)."
        )
