"""What a config's keys may not ask for together, each as an error that names the keys."""

import torch

from zeroamp.policies.accumulation import refusal
from zeroamp.policies.dtypes import DTYPE_BY_NAME, LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.policy import Policy
from zeroamp.policies.schema import Config


def check_policy(policy: Policy) -> None:
    """Raise ConfigError where a policy's values contradict each other."""
    _check_wire(policy)
    _check_scale(policy)
    _check_sharding(policy)
    _check_export(policy)
    if reason := refusal(policy.low_dtype, policy.grad_accum_dtype):
        found = f"{short_name(policy.grad_accum_dtype)} with compute in {short_name(policy.gather_dtype)}"
        raise ConfigError(describe("data_types.grad_accum_dtype", found, '"fp32" or "bf16"', f"{reason}."))


def _check_wire(policy: Policy) -> None:
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


def _check_scale(policy: Policy) -> None:
    scale = policy.loss_scale
    if policy.low_dtype == torch.float16 and not scale.dynamic and scale.initial <= 1:
        raise ConfigError(
            describe(
                "fp16.loss_scale",
                f"{scale.initial:g}, which scales nothing up",
                "0 (dynamic) or a fixed scale above 1",
                "Leave it out: small gradients are zero in float16 otherwise.",
            )
        )


def _check_sharding(policy: Policy) -> None:
    if policy.hpz_partition_size > 1 and policy.stage != 3:
        raise ConfigError(
            describe(
                "zero_optimization.zero_hpz_partition_size",
                f"{policy.hpz_partition_size} at stage {policy.stage}",
                "1, or stage 3",
                "Only stage 3 gathers a second time, for the backward, which a smaller partition makes cheaper.",
            )
        )
    if policy.dp_replicate_size > 1 and policy.stage == 0:
        found = f"{policy.dp_replicate_size} at stage 0"
        remedy = "Stage 0 replicates over all ranks already."
        raise ConfigError(describe("zeroamp.dp_replicate_size", found, "1, or stage 1 and above", remedy))


def _check_export(policy: Policy) -> None:
    if policy.gather_16bit_weights_on_save and policy.low_dtype is None:
        raise ConfigError(
            describe(
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "true without a 16-bit precision",
                "false, or one of torch_autocast, bf16 and fp16 enabled",
                'Enable one, or leave the key out and name the dtype where you save: export_hf(..., dtype="bf16").',
            )
        )


def check_param_dtype(config: Config, policy: Policy) -> None:
    """Raise ConfigError where `data_types.param_dtype` is not what the enabled block makes of parameters."""
    asked = config.data_types.param_dtype
    actual = policy.gather_dtype if policy.mode in ("bf16", "fp16") else torch.float32
    if asked is not None and DTYPE_BY_NAME[asked] != actual:
        raise ConfigError(
            describe(
                "data_types.param_dtype",
                f"{asked!r} with {policy.mode} precision",
                f'"{short_name(actual)}"',
                "It follows from the enabled bf16 or fp16 block: remove it.",
            )
        )
