"""Turns a validated config into its normal form, so that policies of equivalent configs are equal, and back.

In the normal form, defaults that depend on other keys are written out. Of two keys with the same meaning, the first
has the value. A key that is not read has its default. A new key needs code here only if one of these applies to it.
"""

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from zeroamp.policies.batch_sizes import resolve_batch_sizes
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, shown
from zeroamp.policies.json_values import flatten, nest
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES
from zeroamp.policies.schema.config import Config, validate
from zeroamp.policies.schema.keys import Block, Honoured, Native, iter_keys, own_class
from zeroamp.policies.schema.zero import (
    LeafModuleBlock,
    OffloadOptimizerBlock,
    OffloadParamBlock,
    ZeroOptimizationBlock,
)

if TYPE_CHECKING:
    from zeroamp.policies.policy import Policy

Mode = Literal["autocast", "bf16", "fp16", "fp32"]

HELD_BY = {
    "bf16.bf16_optimizer_states": "data_types.optimizer_states_dtype",
    "zero_optimization.offload_optimizer": "zeroamp.offload_between_steps",
}
"""Key or block -> the key or block with the same meaning, which has the value in the normal form."""

_B = TypeVar("_B", bound=Block)


def normalised(config: Config, num_ranks: int | None) -> Config:
    """Return the normal form of `config`. A config in normal form is returned unchanged.

    `num_ranks` is the number of data-parallel ranks, with which batch sizes are derived and checked; None if unknown.

    Raises:
        ConfigError: two keys contradict each other, or a key that the mode needs is missing.
    """
    _check_param_dtype(config)
    _check_states_dtype(config)
    autocast, types, zero = config.torch_autocast, config.data_types, config.zero_optimization
    total, micro, steps = resolve_batch_sizes(
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, num_ranks
    )
    names = autocast.lower_precision_safe_modules
    offload_param = _offload_param(zero)
    offloads_state = offload_param is None and _is_on_cpu(zero.offload_optimizer)
    has_bf16_states = config.bf16.enabled and config.bf16.bf16_optimizer_states
    settled = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "torch_autocast": _changed(
            autocast, lower_precision_safe_modules=DEFAULT_SAFE_MODULES if names is None else names
        ),
        "bf16": _changed(config.bf16, bf16_optimizer_states=None),
        "data_types": _changed(
            types,
            grad_accum_dtype=types.grad_accum_dtype or torch.float32,
            param_dtype=None,
            optimizer_states_dtype="bf16" if has_bf16_states else types.optimizer_states_dtype,
        ),
        "zero_optimization": _changed(
            zero,
            offload_param=offload_param,
            offload_optimizer=None,
            leaf_module=zero.leaf_module or LeafModuleBlock(),
        ),
        "zeroamp": _changed(
            config.zeroamp,
            offload_between_steps=("optimizer",) if offloads_state else config.zeroamp.offload_between_steps,
        ),
        "steps_per_print": config.steps_per_print or 0,
    }
    return _only_read(_changed(config, **settled), config)


def _changed(block: _B, **values: object) -> _B:
    return block.model_copy(update=values)


def _only_read(block: _B, config: Config, prefix: str = "") -> _B:
    """Return `block` with defaults for all keys that are not honoured, or that have no effect in `config`."""
    values: dict[str, object] = {}
    for name, field in type(block).model_fields.items():
        path, value, key_class = f"{prefix}{name}", getattr(block, name), own_class(field)
        if key_class is None and isinstance(value, Block):
            values[name] = _only_read(value, config, f"{path}.")
        elif key_class is not None and (not isinstance(key_class, Honoured) or unread(path, config)):
            values[name] = field.default
    return _changed(block, **values)


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
        ConfigError: autocast is enabled without a low dtype.
    """
    mode, asked = mode_of(config), config.torch_autocast.dtype
    if mode == "autocast" and asked not in LOW_DTYPES:
        found = "left out" if asked is None else f'"{short_name(asked)}"'
        raise ConfigError(
            f'torch_autocast.dtype must be "bfloat16" or "float16" if torch_autocast is enabled, but is {found}. '
            "Write one of them: torch's own default differs by device."
        )
    return {"autocast": asked, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[mode]


def _check_param_dtype(config: Config) -> None:
    asked, mode, low = config.data_types.param_dtype, mode_of(config), low_dtype_of(config)
    actual = low if mode in ("bf16", "fp16") and low is not None else torch.float32
    if asked is not None and asked != actual:
        raise ConfigError(
            f'data_types.param_dtype must be "{short_name(actual)}" in mode {mode}, but is "{short_name(asked)}". '
            "Remove it: only an enabled bf16 or fp16 block changes this dtype."
        )


def _check_states_dtype(config: Config) -> None:
    types, is_low = config.data_types, config.bf16.bf16_optimizer_states
    is_given = config.bf16.enabled and is_low is not None and "optimizer_states_dtype" in types.model_fields_set
    if is_given and is_low != (types.optimizer_states_dtype == "bf16"):
        raise ConfigError(
            f'data_types.optimizer_states_dtype is "{types.optimizer_states_dtype}", but bf16.bf16_optimizer_states is '
            f"{shown(is_low)}. Remove one of them: both set the dtype of the optimizer's state."
        )


def _is_on_cpu(block: OffloadParamBlock | OffloadOptimizerBlock | None) -> bool:
    return block is not None and block.device == "cpu"


def _offload_param(zero: ZeroOptimizationBlock) -> OffloadParamBlock | None:
    """Return the block for the offload of parameters, gradients and optimizer state, or None without it.

    FSDP2 offloads all three together.
    """
    params, optimizer = zero.offload_param, zero.offload_optimizer
    if params is None or not _is_on_cpu(params):
        return None
    if optimizer is not None and _is_on_cpu(optimizer) and optimizer.pin_memory != params.pin_memory:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.pin_memory must be {shown(params.pin_memory)}, as "
            f"offload_param.pin_memory is, but is {shown(optimizer.pin_memory)}. Write the same value in both: FSDP2 "
            "offloads both together."
        )
    return params


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
