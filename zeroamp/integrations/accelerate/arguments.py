"""Combines the arguments of `accelerate.Accelerator` with a config: they fill it, must agree with it, or are refused.

Environment variables that accelerate reads count as arguments: `accelerate launch` passes its options in them.
"""

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

from zeroamp.optimizers.from_config import optimizer_from_config
from zeroamp.optimizers.schedulers import CurveLR
from zeroamp.policies.auto_values import open_auto_keys
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.json_values import flatten, load_config, nest
from zeroamp.policies.key_names import rename_keys
from zeroamp.policies.numbers import WORLD_SIZE, size_from_launcher
from zeroamp.policies.policy import Policy, policy_from_config

CONFIG_VARIABLE = "ZEROAMP_CONFIG"
"""The environment variable with the path of the config, if a script does not pass `zeroamp=`."""

ConfigLike = str | os.PathLike[str] | Mapping[str, Any] | Policy

_BATCH = ("train_micro_batch_size_per_gpu", "train_batch_size")
_STEPS = "gradient_accumulation_steps"
_PRECISIONS = {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Low dtype of a policy -> accelerate's name of that precision."""
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


def config_or_environment(config: ConfigLike | None) -> ConfigLike:
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


def refuse_uncounted_ranks(counted: int, counter: str, argument: str) -> None:
    """Raise ConfigError if more ranks train the model than accelerate counts: each would then get all of the data.

    accelerate counts one rank if it finds no accelerator and was not told to use the CPU.

    Args:
        counted: ranks, as accelerate counts them.
        counter: the name of the object that counts them, for the text.
        argument: what tells accelerate to use the CPU: "use_cpu=True".
    """
    launched = (size_from_launcher(WORLD_SIZE) or 1) if "RANK" in os.environ else 1
    # Without a process group, wrap_model initialises one of all ranks.
    started = dist.get_world_size() if dist.is_initialized() else launched
    if started <= counted:
        return
    what = "torchrun started" if started == launched else "The process group has"
    remedy = f"Without a GPU, pass {argument}."
    if "LOCAL_RANK" not in os.environ:
        remedy = f"Start the script with torchrun, which sets LOCAL_RANK. {remedy}"
    raise ConfigError(
        f"{what} {started} ranks, but {counter} counts {counted}, so every rank would train on all data. {remedy}"
    )


def _refuse_handler(handler: object) -> None:
    name = type(handler).__name__
    if isinstance(handler, GradScalerKwargs):
        raise ConfigError(
            f"kwargs_handlers has {name}, but TrainStep scales the loss. Set fp16.initial_scale_power, "
            "fp16.loss_scale_window and fp16.min_loss_scale in the config of zeroamp=."
        )
    if isinstance(handler, AutocastKwargs):
        raise ConfigError(
            f"kwargs_handlers has {name}, but the config configures autocast. Remove it. For a block in fp32, pass it "
            "to accelerator.autocast(autocast_handler=...)."
        )
    if isinstance(handler, DistributedDataParallelKwargs) and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ConfigError(
            f"kwargs_handlers has {name}(comm_hook={handler.comm_hook}), but gradients are not reduced by DDP. Set "
            "communication_data_type in the config of zeroamp=."
        )
    if "Recipe" in name or "FP8" in name:
        raise ConfigError(f"kwargs_handlers has {name}, but zeroamp does not compute in fp8. Remove it.")


def asked_precision(given: Mapping[str, Any]) -> str | None:
    """Return accelerate's mixed precision: the argument, else the environment variable. None: neither is set.

    "no" in the environment counts as not set, since `accelerate launch` always sets the variable.

    Raises:
        ConfigError: the precision is fp8.
    """
    argument = given.get("mixed_precision")
    precision = str(argument) if argument is not None else os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision == "fp8":
        raise ConfigError(
            f'mixed_precision is "fp8", but zeroamp does not compute in fp8. Choose "bf16": {_REMEDY["bf16"]}.'
        )
    return None if argument is None and precision == "no" else precision


class OpenConfig:
    """A config whose "auto" values are filled later: some from accelerate's arguments, some in `prepare`."""

    def __init__(self, config: ConfigLike, precision: str | None) -> None:
        """`precision`: the result of `asked_precision`."""
        self._policy = config if isinstance(config, Policy) else None
        self._flat = rename_keys(flatten(config.to_config() if isinstance(config, Policy) else load_config(config)))
        self._known: dict[str, Any] = {"gradient_clipping": 0.0}  # clip_grad_norm_ has the norm as an argument
        asked = precision or "no"
        self._known |= {"bf16.enabled": asked == "bf16", "fp16.enabled": asked == "fp16"}
        self._known["torch_autocast.enabled"] = asked != "no"
        if asked != "no":
            self._known["torch_autocast.dtype"] = {"bf16": "bfloat16", "fp16": "float16"}[asked]
        self._precision = precision

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
        self._known[_STEPS] = steps
        self._flat.setdefault(_STEPS, "auto")

    def early_policy(self) -> Policy:
        """Return a policy without the keys that `prepare` fills, so that its errors and precision are known at once.

        Raises:
            ConfigError: the config is wrong, or contradicts accelerate's mixed precision.
        """
        if self._policy is not None:
            policy = self._policy
        else:
            left = [path for path in open_auto_keys(nest(self._flat)) if path not in self._known]
            blocks = tuple(
                f"{path.partition('.')[0]}." for path in left if path.startswith(("optimizer.", "scheduler."))
            )
            early = {path: value for path, value in self._flat.items() if path not in left}
            policy = self._filled({path: value for path, value in early.items() if not path.startswith(blocks)})
        self._refuse_other_precision(policy)
        return policy

    def policy(self, *, batch_size: int | None, world_size: int, hidden_size: int | None) -> Policy:
        """Return the complete policy, with the values that are known in `prepare`.

        Args:
            batch_size: samples of one batch on one rank. None: unknown.
            world_size: number of ranks.
            hidden_size: the width of the model. None: unknown.

        Raises:
            ConfigError: an "auto" cannot be filled, or the config is wrong.
        """
        if self._policy is not None:
            return self._policy
        micro = self._flat.get(_BATCH[0], "auto")
        micro = batch_size if micro == "auto" else micro
        opened = open_auto_keys(nest(self._flat))
        if micro is None and any(key in opened for key in _BATCH):
            key = next(key for key in _BATCH if key in opened)
            raise ConfigError(
                f'{key} is "auto", but no dataloader with a batch size was prepared. Pass the training dataloader to '
                "the same accelerator.prepare() as the model, set the key, or remove it."
            )
        if micro is not None:
            self._known |= {_BATCH[0]: micro, _BATCH[1]: micro * self._known[_STEPS] * world_size}
        if hidden_size is not None:
            self._known["hidden_size"] = hidden_size
        return self._filled(self._flat, world_size)

    def _filled(self, flat: Mapping[str, Any], world_size: int | None = None) -> Policy:
        config = nest(flat)
        names = {name for found in open_auto_keys(config).values() for name in found}
        return policy_from_config(
            config, world_size=world_size, **{name: value for name, value in self._known.items() if name in names}
        )

    def _refuse_other_precision(self, policy: Policy) -> None:
        ours = _PRECISIONS[policy.low_dtype]
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
