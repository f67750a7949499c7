"""From a DeepSpeed-style config to a `Policy`. Every key is either honoured or refused."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeroamp.policies.accumulation import refusal
from zeroamp.policies.dtypes import DTYPE_BY_NAME, LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.loss_scale import NO_LOSS_SCALE, LossScale
from zeroamp.policies.policy import Mode, Policy
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES
from zeroamp.policies.schema import Config, Fp16Block, TorchAutocastBlock, validate

_FLOAT16 = ("fp16", "float16", "half")


def policy_from_config(
    cfg: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int | None = None,  # noqa: ARG001  # a stub, as is `auto`: main has the real ones
    **auto: Any,
) -> Policy:
    """Read a DeepSpeed-style config.

    Args:
        cfg: a mapping, or the path of a JSON file.

    Raises:
        ConfigError: a key is unknown or unsupported, a value is impossible, or two keys contradict each other. The text
            names the key.
    """
    config = validate({key: auto.get(key, value) if value == "auto" else value for key, value in _load(cfg).items()})
    mode, dtype_name = _mode(config)
    comm = config.communication_data_type
    policy = Policy(
        mode=mode,
        low_dtype=None if dtype_name is None else DTYPE_BY_NAME[dtype_name],
        lower_precision_safe_modules=_safe_modules(config),
        stage=config.zero_optimization.stage,
        communication_data_type=None if comm is None else DTYPE_BY_NAME[comm],
        reduce_accumulate_dtype=config.zeroamp.reduce_accumulate_dtype,
        grad_accum_dtype=_accumulation_dtype(config),
        loss_scale=_loss_scale(config.fp16) if dtype_name in _FLOAT16 else NO_LOSS_SCALE,
        count_traffic=config.zeroamp.count_traffic,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        gradient_clipping=config.gradient_clipping,
        param_persistence_threshold=config.zero_optimization.stage3_param_persistence_threshold,
    )
    _check_communication(policy)
    if reason := refusal(policy.low_dtype, policy.grad_accum_dtype):
        found = f"{short_name(policy.grad_accum_dtype)} with compute in {short_name(policy.gather_dtype)}"
        raise ConfigError(describe("data_types.grad_accum_dtype", found, '"fp32" or "bf16"', f"{reason}."))
    return policy


def _load(cfg: object) -> dict[str, Any]:
    if isinstance(cfg, Mapping):
        return dict(cfg)
    if isinstance(cfg, str) and cfg.lstrip().startswith("{"):
        raise ConfigError(
            describe(
                "config", "a string of JSON", "a mapping, or the path of a JSON file", "Call json.loads on it first."
            )
        )
    if not isinstance(cfg, str | os.PathLike):
        raise ConfigError(
            describe(
                "config", f"{type(cfg).__name__} {cfg!r}", "a mapping, or the path of a JSON file", "Pass one of them."
            )
        )
    path = Path(cfg)
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
    except OSError as error:
        raise ConfigError(
            describe(
                "config", f"no readable file at {str(path)!r} ({error})", "the path of a JSON file", "Check the path."
            )
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(describe("config", f"{str(path)!r}: {error}", "a JSON object", "Mend the file.")) from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            describe("config", f"{str(path)!r}: {type(loaded).__name__}", "a JSON object", "Mend the file.")
        )
    return loaded


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(describe(key, "the key twice in one JSON object", "each key once", "Remove one of them."))
    return dict(pairs)


def _mode(config: Config) -> tuple[Mode, str | None]:
    enabled = [name for name in ("torch_autocast", "bf16", "fp16") if getattr(config, name).enabled]
    if len(enabled) > 1:
        raise ConfigError(
            describe(
                ".enabled and ".join(enabled) + ".enabled",
                "several precision modes at once",
                "at most one of torch_autocast, bf16, fp16",
                "Keep torch_autocast for per-op precision, bf16 or fp16 for everything in that dtype.",
            )
        )
    if not enabled:
        return "fp32", None
    if enabled == ["torch_autocast"]:
        return "autocast", _autocast_dtype(config.torch_autocast)
    return ("bf16", "bf16") if enabled == ["bf16"] else ("fp16", "fp16")


def _autocast_dtype(block: TorchAutocastBlock) -> str:
    if block.dtype is None or DTYPE_BY_NAME[block.dtype] not in LOW_DTYPES:
        raise ConfigError(
            describe(
                "torch_autocast.dtype",
                "no dtype" if block.dtype is None else repr(block.dtype),
                '"bfloat16" or "float16"',
                "Say which: torch's own default differs by device.",
            )
        )
    return block.dtype


def _safe_modules(config: Config) -> tuple[str, ...]:
    block = config.torch_autocast
    if not block.enabled:
        return ()
    named = block.lower_precision_safe_modules
    return DEFAULT_SAFE_MODULES if named is None else tuple(named)


def _accumulation_dtype(config: Config) -> torch.dtype:
    names = {config.data_types.grad_accum_dtype, config.gradient_accumulation_dtype} - {None}
    dtypes = {DTYPE_BY_NAME[name] for name in names if name is not None}
    if len(dtypes) > 1:
        raise ConfigError(
            describe(
                "gradient_accumulation_dtype",
                f"{config.gradient_accumulation_dtype!r} beside data_types.grad_accum_dtype "
                f"{config.data_types.grad_accum_dtype!r}",
                "one of the two keys, or both alike",
                "Remove one of them.",
            )
        )
    return dtypes.pop() if dtypes else torch.float32


def _loss_scale(block: Fp16Block) -> LossScale:
    if block.loss_scale > 0:
        return LossScale(initial=block.loss_scale, dynamic=False)
    if block.min_loss_scale > 2.0**block.initial_scale_power:
        raise ConfigError(
            describe(
                "fp16.min_loss_scale",
                f"{block.min_loss_scale:g}, above the initial scale 2**{block.initial_scale_power}",
                "at most the initial scale",
                "Lower it, or raise fp16.initial_scale_power.",
            )
        )
    return LossScale(
        initial=2.0**block.initial_scale_power,
        window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        consecutive_hysteresis=block.consecutive_hysteresis,
        minimum=block.min_loss_scale,
    )


def _check_communication(policy: Policy) -> None:
    """Refuse wires that would lose what the rest of the config promises."""
    asked, wire = policy.communication_data_type, policy.wire_dtype
    is_native = policy.reduce_accumulate_dtype == "native"
    if asked == torch.float16 and policy.low_dtype != torch.float16:
        reason = "float16 gradients over- and underflow without loss scaling, which only float16 compute has."
        raise ConfigError(describe("communication_data_type", "fp16", '"fp32" or "bf16"', reason))
    if policy.stage == 0 and asked in LOW_DTYPES and not is_native:
        raise ConfigError(
            describe(
                "communication_data_type",
                f"{short_name(wire)} at stage 0 with zeroamp.reduce_accumulate_dtype fp32",
                '"fp32", or reduce_accumulate_dtype "native", or stage 1 and above',
                "Stage 0 is an all-reduce, which sums on the way: a sum in fp32 needs fp32 on the wire.",
            )
        )
    if policy.stage == 0 and is_native and wire == torch.float16:
        raise ConfigError(
            describe(
                "zeroamp.reduce_accumulate_dtype",
                "native at stage 0 with fp16 on the wire",
                '"fp32", or communication_data_type "fp32" or "bf16"',
                "An all-reduce of fp16 divides after it has summed, and overflows.",
            )
        )
