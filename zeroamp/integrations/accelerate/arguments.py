"""Combines the arguments of `accelerate.Accelerator` with a config: they fill it, must agree with it, or are refused.

Environment variables that accelerate reads count as arguments: `accelerate launch` passes its options in them.
"""

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

from zeroamp.integrations.config_values import PRECISIONS, ConfigOrPolicy, Precision, fill_precision, flat_config
from zeroamp.optimizers.from_config import optimizer_from_config
from zeroamp.optimizers.schedulers import CurveLR
from zeroamp.policies.auto_values import AUTO, open_auto_keys
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.json_values import nest
from zeroamp.policies.policy import Policy, policy_from_config

CONFIG_VARIABLE = "ZEROAMP_CONFIG"
"""The environment variable with the path of the config, if a script does not pass `zeroamp=`."""

_BATCH_SIZES = ("train_micro_batch_size_per_gpu", "train_batch_size")
_STEPS = "gradient_accumulation_steps"
_REMEDY = {
    "no": 'remove the blocks torch_autocast, bf16 and fp16, or set their "enabled" to false',
    "bf16": 'set torch_autocast.enabled to true and torch_autocast.dtype to "bfloat16", or bf16.enabled to true',
    "fp16": 'set torch_autocast.enabled to true and torch_autocast.dtype to "float16", or fp16.enabled to true',
}
_PLUGINS = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "torch_tp_plugin": None,
}
"""Argument for another way to shard -> the environment variable that enables it."""


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
    if not found and not isinstance(found, Mapping):
        raise ConfigError(
            f"ZeroampAccelerator has no config. Pass zeroamp=, the path of a JSON file, a mapping or a Policy, or set "
            f"the environment variable {CONFIG_VARIABLE} to a path."
        )
    return found


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments and environment variables that select another way to shard or scale the loss."""
    for name, variable in _PLUGINS.items():
        what = name if given.get(name) is not None else None
        if what is None and variable is not None and os.environ.get(variable, "").lower() in ("true", "1"):
            what = f"the environment variable {variable}"
        if what is not None:
            raise ConfigError(
                f"ZeroampAccelerator got {what}, but zeroamp shards the model itself. Remove it, and set "
                "zero_optimization.stage in the config of zeroamp=."
            )
    for handler in given.get("kwargs_handlers") or ():
        _refuse_handler(handler)


def _refuse_handler(handler: object) -> None:
    """Raise ConfigError for a handler of kwargs that would change what the config decides."""
    name, reason = type(handler).__name__, None
    if isinstance(handler, GradScalerKwargs):
        reason = "TrainStep scales the loss. Set fp16.initial_scale_power and its like in the config."
    elif isinstance(handler, AutocastKwargs):
        reason = (
            "the config decides autocast. For a block in fp32, pass it to accelerator.autocast(autocast_handler=...)."
        )
    elif isinstance(handler, DistributedDataParallelKwargs) and handler.comm_hook != DDPCommunicationHookType.NO:
        reason = "gradients are not reduced by DDP. Set communication_data_type in the config."
    elif "Recipe" in name or "FP8" in name:
        reason = "zeroamp does not compute in fp8. Remove it."
    if reason is not None:
        raise ConfigError(f"kwargs_handlers has {name}, but {reason}")


def asked_precision(given: Mapping[str, Any]) -> Precision | None:
    """Return accelerate's mixed precision: the argument, else the environment variable. None: neither is set.

    "no" in the environment counts as not set, since `accelerate launch` always sets the variable.

    Raises:
        ConfigError: zeroamp does not have the precision.
    """
    argument = given.get("mixed_precision")
    asked = str(argument) if argument is not None else os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    precision = next((name for name in PRECISIONS.values() if name == asked), None)
    if precision is None:
        raise ConfigError(f'mixed_precision must be "no", "bf16" or "fp16" with zeroamp, but is "{asked}".')
    return None if argument is None and precision == "no" else precision


class OpenConfig:
    """A config whose "auto" values are filled from accelerate's arguments, and sizes in `prepare` from the model."""

    def __init__(self, config: ConfigOrPolicy, precision: Precision | None) -> None:
        """`precision`: the result of `asked_precision`."""
        self._policy = config if isinstance(config, Policy) else None
        self._flat = {} if isinstance(config, Policy) else flat_config(config)
        self._precision = precision
        fill_precision(self._flat, precision or "no")
        for path in _BATCH_SIZES:  # dataloaders decide them; given values are only checked
            if self._flat.get(path) == AUTO:
                del self._flat[path]
        if self._flat.get("gradient_clipping") == AUTO:
            self._flat["gradient_clipping"] = 0.0  # clip_grad_norm_ has the norm as an argument

    @property
    def accumulation_steps(self) -> int | None:
        """The config's number of accumulation steps; None if accelerate decides it."""
        if self._policy is not None:
            return self._policy.gradient_accumulation_steps
        steps = self._flat.get(_STEPS)
        return steps if isinstance(steps, int) else None

    def fill_steps(self, steps: int) -> None:
        """Fill in accelerate's number of accumulation steps.

        Raises:
            ConfigError: the config has another number.
        """
        own = self.accumulation_steps
        if own is not None and own != steps:
            raise ConfigError(
                f"gradient_accumulation_steps is {own} in the config, but {steps} in accelerate's arguments. Remove "
                'one of them, or write "auto" in the config.'
            )
        self._flat[_STEPS] = steps

    def early_policy(self) -> Policy:
        """Return a policy without the keys that are still "auto", so that its errors and precision are known at once.

        Raises:
            ConfigError: the config is wrong, or contradicts accelerate's mixed precision.
        """
        policy = self._policy
        if policy is None:
            left = open_auto_keys(nest(self._flat))
            blocks = tuple(f"{path.split('.')[0]}." for path in left if path.startswith(("optimizer.", "scheduler.")))
            known = {path: value for path, value in self._flat.items() if path not in left}
            policy = policy_from_config(
                nest({path: value for path, value in known.items() if not path.startswith(blocks)})
            )
        self._refuse_other_precision(policy)
        return policy

    def policy(self, *, world_size: int, hidden_size: int | None) -> Policy:
        """Return the complete policy. `hidden_size`: the width of the model; None: unknown.

        Raises:
            ConfigError: an "auto" cannot be filled, or the config is wrong.
        """
        if self._policy is not None:
            return self._policy
        config = nest(self._flat)
        is_needed = any("hidden_size" in names for names in open_auto_keys(config).values())
        known = {"hidden_size": hidden_size} if is_needed and hidden_size is not None else {}
        return policy_from_config(config, world_size=world_size, **known)

    def _refuse_other_precision(self, policy: Policy) -> None:
        ours = PRECISIONS[policy.low_dtype]
        if self._precision is not None and self._precision != ours:
            raise ConfigError(
                f'mixed_precision is "{self._precision}" in accelerate\'s arguments, but the config of zeroamp= has '
                f'"{ours}". Leave mixed_precision out, or, for "{self._precision}", {_REMEDY[self._precision]}.'
            )


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
            what = f" with another {', '.join(keys)}" if type(optimizer) is type(wanted) else ""
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
