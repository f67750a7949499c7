"""Raises errors for keys of a config whose values contradict each other. Each error names the keys."""

from typing import TYPE_CHECKING

import torch

from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, shown
from zeroamp.policies.extensions import extensions_of
from zeroamp.policies.schema.precision import OverrideBlock

if TYPE_CHECKING:
    from zeroamp.policies.policy import Policy


def check_policy(policy: "Policy") -> None:
    """Raise ConfigError if values of a policy contradict each other."""
    _check_communication("communication_data_type", policy.communication_data_type, policy)
    _check_native("communication_data_type", policy.communication_dtype, policy)
    for index, override in enumerate(policy.overrides):
        _check_override(f"zeroamp.overrides.{index}", override, policy)
    _check_scale(policy)
    _check_sharding(policy)
    if policy.config.zeroamp.seed is not None and not policy.reproducible:
        raise ConfigError(
            f"zeroamp.seed is {policy.config.zeroamp.seed}, but zeroamp.reproducible is false, so the seed would not "
            "be used. Set reproducible to true, or remove the seed and call torch.manual_seed."
        )
    if policy.keep_inputs_in_fp32 and policy.mode not in ("bf16", "fp16"):
        raise ConfigError(
            f"zeroamp.keep_inputs_in_fp32 must be empty unless bf16 or fp16 is enabled, but is "
            f"{shown(list(policy.keep_inputs_in_fp32))}. Other modes cast no inputs: remove the key."
        )
    for extension in extensions_of(policy):
        extension.check_config(policy)
    if policy.gather_16bit_weights_on_save and policy.low_dtype is None:
        raise ConfigError(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save must be false unless torch_autocast, bf16 or "
            "fp16 is enabled, but is true. Enable one of them, or leave the key out and pass the dtype when you save: "
            'export_hf(..., dtype="bf16").'
        )
    if reason := refusal(policy.low_dtype, policy.grad_accum_dtype):
        raise ConfigError(
            f'data_types.grad_accum_dtype must be "fp32" or "bf16" with compute in {short_name(policy.param_dtype)}, '
            f'but is "{short_name(policy.grad_accum_dtype)}": {reason}. Change one of the two.'
        )


def refusal(low_dtype: torch.dtype | None, accumulate: torch.dtype) -> str | None:
    """Return why gradients of this compute dtype cannot accumulate in `accumulate`, or None if they can."""
    if accumulate == torch.float16 and low_dtype != torch.float16:
        return "float16 gradients over- and underflow without loss scaling, which only float16 compute has"
    return None


def _check_communication(key: str, asked: torch.dtype | None, policy: "Policy") -> None:
    """Raise for a communication dtype that would overflow, or that rounds sums which other keys set to fp32."""
    is_native = policy.reduce_accumulate_dtype == "native"
    if asked == torch.float16 and policy.low_dtype != torch.float16:
        raise ConfigError(
            f'{key} must be "fp32" or "bf16" unless something computes in float16, but is "fp16". '
            "Change it: float16 gradients over- and underflow without loss scaling, which only float16 compute has."
        )
    if policy.stage == 0 and asked in LOW_DTYPES and not is_native:
        raise ConfigError(
            f'{key} must be "fp32" at stage 0 with zeroamp.reduce_accumulate_dtype "fp32", but is '
            f'"{short_name(asked)}". Stage 0 runs an all-reduce, which sums in the communication dtype. Use fp32, '
            'reduce_accumulate_dtype "native", or stage 1 and above.'
        )


def _check_native(key: str, communication: torch.dtype | None, policy: "Policy") -> None:
    """Raise for a native sum of fp16 at stage 0. `communication`: by the key, or by default."""
    if policy.stage == 0 and policy.reduce_accumulate_dtype == "native" and communication == torch.float16:
        raise ConfigError(
            f'zeroamp.reduce_accumulate_dtype must be "fp32" at stage 0 with {key} in fp16, but is "native". Change '
            "one of the two: an all-reduce of fp16 may overflow, because it divides after the sum."
        )


def _check_override(where: str, override: OverrideBlock, policy: "Policy") -> None:
    """Raise for an item of `zeroamp.overrides` whose dtypes contradict each other or the mode."""
    if not override.modules or not all(override.modules):
        raise ConfigError(
            f"{where}.modules must name modules, but is {shown(list(override.modules))}. Write FQNs, patterns of them, "
            "or class names."
        )
    if not override.settings():
        raise ConfigError(f"{where} sets no dtype. Add compute, param or communication, or remove the item.")
    for name, asked in (("compute", override.compute), ("param", override.param)):
        if asked in (None, torch.float32, policy.low_dtype):
            continue
        low = "" if policy.low_dtype is None else f' or "{short_name(policy.low_dtype)}"'
        remedy = "Change it: one model has one low precision."
        if policy.low_dtype is None:
            remedy = f"Change it, or enable torch_autocast or a {short_name(asked)} block."
        raise ConfigError(
            f'{where}.{name} must be "fp32"{low} in mode {policy.mode}, but is "{short_name(asked)}". {remedy}'
        )
    if override.compute is not None and override.param not in (None, override.compute):
        raise ConfigError(
            f'{where}.param must be "{short_name(override.compute)}", as compute is, but is '
            f'"{short_name(override.param)}". Remove one of them. Without compute, the modules compute in the '
            "precision of the mode."
        )
    _check_communication(f"{where}.communication", override.communication, policy)
    _check_native(f"{where}.communication", override.communication, policy)


def _check_scale(policy: "Policy") -> None:
    scale = policy.loss_scale
    if policy.low_dtype != torch.float16:
        return
    if not scale.dynamic and scale.initial <= 1:
        raise ConfigError(
            f"fp16.loss_scale must be 0 (dynamic) or above 1, but is {scale.initial:g}. Leave it out: small gradients "
            "are zero in float16 without a scale."
        )
    if scale.dynamic and scale.minimum > scale.initial:
        raise ConfigError(
            f"fp16.min_loss_scale must be at most the initial scale, {scale.initial:g} by fp16.initial_scale_power, "
            f"but is {scale.minimum:g}. Lower it, or raise fp16.initial_scale_power."
        )


def _check_sharding(policy: "Policy") -> None:
    if policy.hpz_partition_size > 1 and policy.stage != 3:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size must be 1 at stage {policy.stage}, but is "
            f"{policy.hpz_partition_size}. Remove it: only stage 3 all-gathers parameters again for the backward."
        )
    if policy.dp_replicate_size > 1 and policy.stage == 0:
        raise ConfigError(
            f"zeroamp.dp_replicate_size must be 1 at stage 0, but is {policy.dp_replicate_size}. Stage 0 replicates "
            "over all ranks already. Use stage 1 or above to shard within replicas."
        )
