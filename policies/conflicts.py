"""What the keys of a config may not ask for together, each as an error that names the keys."""

from typing import TYPE_CHECKING

import torch

from zeroamp.policies.accumulation import refusal
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, describe

if TYPE_CHECKING:
    from zeroamp.policies.policy import Policy


def check_policy(policy: "Policy") -> None:
    """Raise ConfigError where values of a policy contradict each other."""
    _check_communication(policy)
    _check_scale(policy)
    _check_sharding(policy)
    if policy.gather_16bit_weights_on_save and policy.low_dtype is None:
        raise ConfigError(
            describe(
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "true",
                "false unless torch_autocast, bf16 or fp16 is enabled",
                'Enable one, or leave the key out and name the dtype where you save: export_hf(..., dtype="bf16").',
            )
        )
    if reason := refusal(policy.low_dtype, policy.grad_accum_dtype):
        valid = f'"fp32" or "bf16" with compute in {short_name(policy.gather_dtype)}'
        raise ConfigError(
            describe("data_types.grad_accum_dtype", f'"{short_name(policy.grad_accum_dtype)}"', valid, f"{reason}.")
        )


def _check_communication(policy: "Policy") -> None:
    """Refuse communication dtypes that would lose what the rest of the config promises."""
    asked, dtype = policy.communication_data_type, policy.wire_dtype
    is_native = policy.reduce_accumulate_dtype == "native"
    if asked == torch.float16 and policy.low_dtype != torch.float16:
        reason = "float16 gradients over- and underflow without loss scaling, which only float16 compute has."
        raise ConfigError(describe("communication_data_type", '"fp16"', '"fp32" or "bf16"', reason))
    if policy.stage == 0 and asked in LOW_DTYPES and not is_native:
        raise ConfigError(
            describe(
                "communication_data_type",
                f'"{short_name(dtype)}"',
                '"fp32" at stage 0 with zeroamp.reduce_accumulate_dtype "fp32"',
                "Stage 0 is an all-reduce, which sums in the communication dtype: use fp32, reduce_accumulate_dtype "
                '"native", or stage 1 and above.',
            )
        )
    if policy.stage == 0 and is_native and dtype == torch.float16:
        raise ConfigError(
            describe(
                "zeroamp.reduce_accumulate_dtype",
                '"native"',
                '"fp32" at stage 0 with communication in fp16',
                "An all-reduce of fp16 divides after it has summed, and overflows. Or set communication_data_type to "
                '"fp32" or "bf16".',
            )
        )


def _check_scale(policy: "Policy") -> None:
    scale = policy.loss_scale
    if policy.low_dtype != torch.float16:
        return
    if not scale.dynamic and scale.initial <= 1:
        raise ConfigError(
            describe(
                "fp16.loss_scale",
                f"{scale.initial:g}",
                "0 (dynamic) or above 1",
                "Leave it out: small gradients are zero in float16 without a scale.",
            )
        )
    if scale.dynamic and scale.minimum > scale.initial:
        power = policy.config.fp16.initial_scale_power
        valid = f"at most the initial scale, 2**{power} = {scale.initial:g}"
        remedy = "Lower it, or raise fp16.initial_scale_power."
        raise ConfigError(describe("fp16.min_loss_scale", f"{scale.minimum:g}", valid, remedy))


def _check_sharding(policy: "Policy") -> None:
    if policy.hpz_partition_size > 1 and policy.stage != 3:
        raise ConfigError(
            describe(
                "zero_optimization.zero_hpz_partition_size",
                f"{policy.hpz_partition_size}",
                f"1 at stage {policy.stage}",
                "Only stage 3 all-gathers parameters again for the backward, over the ranks of the partition.",
            )
        )
    if policy.dp_replicate_size > 1 and policy.stage == 0:
        remedy = "Stage 0 replicates over all ranks already. Use stage 1 or above to shard within replicas."
        raise ConfigError(describe("zeroamp.dp_replicate_size", f"{policy.dp_replicate_size}", "1 at stage 0", remedy))
