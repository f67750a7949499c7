"""Derives fields of a policy from several keys of its config, and refuses keys that contradict each other."""

from dataclasses import dataclass
from typing import Literal

import torch

from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, shown
from zeroamp.policies.loss_scale_rule import NO_LOSS_SCALE, LossScale
from zeroamp.policies.schema.config import Config

Mode = Literal["autocast", "bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """The device of sharded parameters, their gradients and the optimizer state. FSDP2 offloads all three together."""

    to_cpu: bool = False
    """Whether the shards are on the CPU. Unsharded parameters are on the accelerator in any case."""

    pin_memory: bool = True
    """Whether the shards are in page-locked memory, so that copies overlap with compute. No effect on CPUs."""


NO_OFFLOAD = Offload()


def mode_of(config: Config) -> Mode:
    """Return the mode of the enabled block; "fp32" if none is enabled.

    Raises:
        ConfigError: several blocks are enabled.
    """
    blocks: dict[str, Mode] = {"torch_autocast": "autocast", "bf16": "bf16", "fp16": "fp16"}
    enabled = [name for name in blocks if getattr(config, name).enabled]
    if len(enabled) > 1:
        raise ConfigError(
            f"{'.enabled and '.join(enabled)}.enabled are true, but at most one of torch_autocast, bf16 and fp16 may "
            "be enabled. Keep torch_autocast for per-op precision, or bf16 or fp16 for everything in that dtype."
        )
    return blocks[enabled[0]] if enabled else "fp32"


def low_dtype_of(config: Config) -> torch.dtype | None:
    """Return the low dtype of the mode: bfloat16 or float16; None for mode "fp32".

    Raises:
        ConfigError: autocast is enabled without a low dtype, or `data_types.param_dtype` is not that of the mode.
    """
    mode, asked, param = mode_of(config), config.torch_autocast.dtype, config.data_types.param_dtype
    if mode == "autocast" and asked not in LOW_DTYPES:
        found = "left out" if asked is None else f'"{short_name(asked)}"'
        raise ConfigError(
            f'torch_autocast.dtype must be "bfloat16" or "float16" if torch_autocast is enabled, but is {found}. '
            "Write one of them: torch's own default differs by device."
        )
    low = {"autocast": asked, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[mode]
    actual = low if mode in ("bf16", "fp16") and low is not None else torch.float32
    if param not in (None, actual):
        raise ConfigError(
            f'data_types.param_dtype must be "{short_name(actual)}" in mode {mode}, but is "{short_name(param)}". '
            "Remove it: only an enabled bf16 or fp16 block changes this dtype."
        )
    return low


def loss_scale_of(config: Config) -> LossScale:
    """Return the settings of loss scaling; `NO_LOSS_SCALE` unless the mode computes in float16."""
    block = config.fp16
    if low_dtype_of(config) != torch.float16:
        return NO_LOSS_SCALE
    if block.loss_scale > 0:
        return LossScale(initial=block.loss_scale, dynamic=False)
    return LossScale(
        initial=2.0**block.initial_scale_power,
        window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        consecutive_hysteresis=block.consecutive_hysteresis,
        minimum=block.min_loss_scale,
    )


def states_dtype_of(config: Config) -> torch.dtype | None:
    """Return bfloat16 if AdamW stores its moments in it, else None. Two keys set this dtype.

    Raises:
        ConfigError: the two keys contradict each other.
    """
    types, is_low = config.data_types, config.bf16.bf16_optimizer_states if config.bf16.enabled else None
    is_given = is_low is not None and "optimizer_states_dtype" in types.model_fields_set
    if is_given and is_low != (types.optimizer_states_dtype == "bf16"):
        raise ConfigError(
            f'data_types.optimizer_states_dtype is "{types.optimizer_states_dtype}", but bf16.bf16_optimizer_states is '
            f"{shown(is_low)}. Remove one of them: both set the dtype of the optimizer's state."
        )
    return torch.bfloat16 if is_low or types.optimizer_states_dtype == "bf16" else None


def offload_of(config: Config) -> Offload:
    """Return the device of parameters, gradients and optimizer state.

    Raises:
        ConfigError: the blocks for parameters and for the optimizer have different `pin_memory`.
    """
    params, optimizer = config.zero_optimization.offload_param, config.zero_optimization.offload_optimizer
    if params is None or params.device != "cpu":
        return NO_OFFLOAD
    if optimizer is not None and optimizer.device == "cpu" and optimizer.pin_memory != params.pin_memory:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.pin_memory must be {shown(params.pin_memory)}, as "
            f"offload_param.pin_memory is, but is {shown(optimizer.pin_memory)}. Write the same value in both: FSDP2 "
            "offloads both together."
        )
    return Offload(to_cpu=True, pin_memory=params.pin_memory)


def offload_between_steps_of(config: Config) -> tuple[Literal["optimizer"], ...]:
    """Return what is in host memory between the updates only. Two keys set it.

    Raises:
        ConfigError: the two keys contradict each other.
    """
    asked, block = config.zeroamp.offload_between_steps, config.zero_optimization.offload_optimizer
    if block is None or block.device != "cpu" or offload_of(config).to_cpu:
        return asked
    if not asked and "offload_between_steps" in config.zeroamp.model_fields_set:
        raise ConfigError(
            'zeroamp.offload_between_steps is [], but zero_optimization.offload_optimizer.device is "cpu". Remove one '
            "of them: both offload the optimizer's state between the updates."
        )
    return ("optimizer",)


def unread(path: str, config: Config) -> str | None:
    """Return why an honoured key has no effect in this config, whatever its value; None if it may have an effect."""
    block, _, name = path.rpartition(".")
    if name == "enabled":
        return None
    if block in ("torch_autocast", "bf16") and not getattr(config, block).enabled:
        return f"{block} is not enabled"
    if block == "fp16" and low_dtype_of(config) != torch.float16:
        return "nothing computes in float16"
    if block == "fp16" and name != "loss_scale" and config.fp16.loss_scale > 0:
        return "fp16.loss_scale fixes the scale"
    return None
