"""What the keys of a config may not ask for together, each as an error that names the keys."""

from typing import TYPE_CHECKING

import torch

from zeroamp.policies.accumulation import refusal
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError

if TYPE_CHECKING:
    from zeroamp.policies.policy import Policy


def check_policy(policy: "Policy") -> None:
    """Raise ConfigError where values of a policy contradict each other."""
    _check_communication(policy)
    _check_scale(policy)
    _check_sharding(policy)
    if policy.gather_16bit_weights_on_save and policy.low_dtype is None:
        raise ConfigError(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save must be false unless torch_autocast, bf16 or "
            "fp16 is enabled, but is true. Enable one, or leave the key out and name the dtype where you save: "
            'export_hf(..., dtype="bf16").'
        )
    if reason := refusal(policy.low_dtype, policy.grad_accum_dtype):
        raise ConfigError(
            f'data_types.grad_accum_dtype must be "fp32" or "bf16" with compute in {short_name(policy.gather_dtype)}, '
            f'but is "{short_name(policy.grad_accum_dtype)}": {reason}. Change one of the two.'
        )


def _check_communication(policy: "Policy") -> None:
    """Refuse communication dtypes that would lose what the rest of the config promises."""
    asked, is_native = policy.communication_data_type, policy.reduce_accumulate_dtype == "native"
    if asked == torch.float16 and policy.low_dtype != torch.float16:
        raise ConfigError(
            'communication_data_type must be "fp32" or "bf16" unless something computes in float16, but is "fp16". '
            "Change it: float16 gradients over- and underflow without loss scaling, which only float16 compute has."
        )
    if policy.stage == 0 and asked in LOW_DTYPES and not is_native:
        raise ConfigError(
            'communication_data_type must be "fp32" at stage 0 with zeroamp.reduce_accumulate_dtype "fp32", but is '
            f'"{short_name(asked)}". Stage 0 is an all-reduce, which sums in the communication dtype: use fp32, '
            'reduce_accumulate_dtype "native", or stage 1 and above.'
        )
    if policy.stage == 0 and is_native and policy.wire_dtype == torch.float16:
        raise ConfigError(
            'zeroamp.reduce_accumulate_dtype must be "fp32" at stage 0 with communication in fp16, but is "native". '
            "Change it, or set communication_data_type to fp32 or bf16: an all-reduce of fp16 divides after it has "
            "summed, and overflows."
        )


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
            "over all ranks already: use stage 1 or above to shard within replicas."
        )
