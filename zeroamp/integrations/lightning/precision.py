"""Combines `precision=` and the config to the policy of a strategy.

| `precision=` | config without a precision block | config with one |
|---|---|---|
| none, "32-true" | fp32 | the config's |
| "bf16-mixed", "16-mixed" | `torch_autocast` in bfloat16 or float16, with Lightning's loss scale | must be the same |
| others, plugins | refused | refused |
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from zeroamp.policies.auto_values import AUTO, open_auto_keys
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.json_values import flatten, load_config, nest
from zeroamp.policies.policy import Policy, policy_from_config

Mixed = Literal["bf16-mixed", "16-mixed"]

_DTYPES = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
_BLOCKS = ("torch_autocast", "bf16", "fp16")
_LOSS_SCALE = {"loss_scale_window": 2000, "hysteresis": 1}
"""Keys of `fp16` whose defaults differ from Lightning's `torch.amp.GradScaler` -> the values of that."""
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


def mixed_precision_of(plugin: FabricPrecision | None) -> Mixed | None:
    """Return the mixed precision of a precision plugin of Lightning, or None for "32-true".

    Raises:
        ConfigError: the plugin has another precision.
    """
    if plugin is None or type(plugin) in (FabricPrecision, Precision):
        return None
    if type(plugin) in (FabricMixedPrecision, MixedPrecision) and plugin.precision in _DTYPES:
        _refuse_own_scaler(plugin)
        mixed: Mixed = "bf16-mixed" if plugin.precision == "bf16-mixed" else "16-mixed"
        return mixed
    asked = str(getattr(plugin, "precision", "?"))
    if asked in ("bf16-true", "16-true"):
        block = "bf16" if asked == "bf16-true" else "fp16"
        raise ConfigError(
            f'precision="{asked}" would store the parameters in low precision, but zeroamp stores fp32 shards (master '
            f'weights). Leave precision out, and write "{block}": {{"enabled": true}} in the config: parameters are '
            "then all-gathered and used in low precision."
        )
    raise ConfigError(
        describe(
            "The precision of a zeroamp strategy",
            f"{type(plugin).__name__} ({asked})",
            '"32-true" (the config decides), "bf16-mixed" or "16-mixed"',
            "Set the precision in the config: torch_autocast, bf16 or fp16.",
        )
    )


def _refuse_own_scaler(plugin: Any) -> None:
    """Refuse a plugin whose GradScaler has other values than Lightning's default."""
    if plugin.scaler is None:
        return
    default = torch.amp.GradScaler(device=plugin.device, enabled=plugin.scaler.is_enabled())
    own, usual = plugin.scaler.state_dict(), default.state_dict()
    if differing := [name for name in usual if own[name] != usual[name]]:
        raise ConfigError(
            f"The precision plugin has a GradScaler with another {differing[0]} ({own[differing[0]]}), but zeroamp "
            'scales the loss. Set "fp16" in the config: initial_scale_power, loss_scale_window, hysteresis.'
        )


def policy_of(
    config: Policy | Mapping[str, Any] | Any | None,
    mixed: Mixed | None,
    *,
    stage: int | None,
    world_size: int | None,
    accumulation: int | None = None,
    clipping: float | None = None,
) -> Policy:
    """Return the policy of a strategy.

    `zeroamp.sync_module_states` is true by default: ranks get the first rank's parameters, as with DDP.

    Args:
        config: a path, a mapping, a policy, or None for the defaults with stage 3.
        mixed: the mixed precision of `precision=`.
        stage: the ZeRO stage, if there is no config. None: 3.
        world_size: the number of ranks, for batch sizes.
        accumulation: micro-batches per optimizer step, if the trainer counts them. Fills the config's key, or must
            agree with it.
        clipping: the largest gradient norm, if the trainer has one. Fills the config's key, or must agree with it.

    Raises:
        ConfigError: the config is invalid, or contradicts the arguments.
    """
    if isinstance(config, Policy):
        _refuse_other_precision(config, mixed)
        _refuse_others(dict(config.given), accumulation, clipping)
        return config
    flat = flatten(load_config({} if config is None else config))
    if config is None:
        flat["zero_optimization.stage"] = 3 if stage is None else stage
    if mixed is not None:
        _fill_precision(flat, mixed)
    _refuse_others(flat, accumulation, clipping)
    if accumulation is not None:
        flat["gradient_accumulation_steps"] = accumulation
    if clipping is not None or flat.get("gradient_clipping") == AUTO:
        flat["gradient_clipping"] = clipping or 0.0
    if flat.get("gradient_accumulation_steps") == AUTO:
        flat["gradient_accumulation_steps"] = 1
    flat.setdefault("zeroamp.sync_module_states", True)  # as with DDP: Lightning's loops may not seed
    for path in _BATCH_SIZES:  # Lightning's data loaders decide them; given values are only checked
        if flat.get(path) == AUTO:
            del flat[path]
    cfg = nest(flat)
    if "train_batch_size" not in flat:  # else the number of ranks is not needed
        world_size = None
    if left := open_auto_keys(cfg):
        raise ConfigError(
            f'{next(iter(left))} is "auto", but Lightning has no value for it. Write the value, or pass the strategy '
            f"zeroamp.policy_from_config(cfg, {next(iter(left.values()))[1]}=...)."
        )
    policy = policy_from_config(cfg, world_size=world_size)
    _refuse_other_precision(policy, mixed)
    return policy


def _fill_precision(flat: dict[str, Any], mixed: Mixed) -> None:
    """Set the keys for mixed precision that the config does not set."""
    dtype = _DTYPES[mixed]
    if flat.get("torch_autocast.enabled") == AUTO:
        flat["torch_autocast.enabled"] = True
    for block, own in (("bf16", "bfloat16"), ("fp16", "float16")):
        if flat.get(f"{block}.enabled") == AUTO:  # as in configs for DeepSpeed: enable the block of the dtype
            flat[f"{block}.enabled"] = own == dtype
    is_open = not any(flat.get(f"{block}.enabled") for block in _BLOCKS)
    if is_open and flat.get("torch_autocast.enabled") is None:
        flat["torch_autocast.enabled"] = True
    if flat.get("torch_autocast.enabled") is True and flat.get("torch_autocast.dtype", AUTO) == AUTO:
        flat["torch_autocast.dtype"] = dtype
    if dtype == "float16" and not any(path.startswith("fp16.") for path in flat):
        flat |= {f"fp16.{key}": value for key, value in _LOSS_SCALE.items()}


def _refuse_other_precision(policy: Policy, mixed: Mixed | None) -> None:
    if mixed is None:
        return
    found = "fp32" if policy.low_dtype is None else f"{policy.mode} in {short_name(policy.low_dtype)}"
    asked = torch.bfloat16 if mixed == "bf16-mixed" else torch.float16
    if policy.mode != "autocast" or policy.low_dtype != asked:
        hint = "" if mixed == "16-mixed" else ' (on CPUs, Lightning turns "16-mixed" into "bf16-mixed")'
        raise ConfigError(
            f'precision="{mixed}" is torch.autocast in {short_name(asked)}{hint}, but the config sets {found}. Leave '
            "precision out, so that the config decides, or set torch_autocast in the config."
        )


def _refuse_others(flat: dict[str, Any], accumulation: int | None, clipping: float | None) -> None:
    """Refuse values of the config that differ from the trainer's."""
    for path, argument, value in (
        ("gradient_accumulation_steps", "accumulate_grad_batches", accumulation),
        ("gradient_clipping", "gradient_clip_val", clipping),
    ):
        found = flat.get(path, AUTO)
        if value is not None and found not in (AUTO, None) and found != value:
            raise ConfigError(
                f"{path} is {found} in the config, but {argument} of the Trainer is {value}. Set only one of them, or "
                "both to the same value."
            )


def autocast_of_policy(policy: Policy, device_type: str) -> AbstractContextManager[Any]:
    """Return the config's autocast. It does not cache casts, since parameters may be updated inside it."""
    if policy.mode != "autocast":
        return nullcontext()
    return torch.autocast(device_type, dtype=policy.param_dtype, cache_enabled=False)
