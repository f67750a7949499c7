"""From a DeepSpeed-style config to a `Policy`. Every key is honoured, native (it changes nothing), or refused."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import torch

from zeroamp.policies.auto_values import fill_auto
from zeroamp.policies.batch_sizes import resolve_batch_sizes
from zeroamp.policies.conflicts import check_param_dtype, check_policy
from zeroamp.policies.dtypes import DTYPE_BY_NAME, LOW_DTYPES
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.load import flatten, load_config
from zeroamp.policies.loss_scale import NO_LOSS_SCALE, LossScale
from zeroamp.policies.policy import NO_LEAF_MODULES, NO_OFFLOAD, LeafModules, Mode, Offload, Policy
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES
from zeroamp.policies.schema import Config, Fp16Block, TorchAutocastBlock, validate

_FLOAT16 = ("fp16", "float16", "half")


def policy_from_config(
    cfg: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int | None = None, **auto: Any
) -> Policy:
    """Read a DeepSpeed-style config.

    Args:
        cfg: a mapping, or the path of a JSON file.
        world_size: data-parallel ranks, to derive and check batch sizes. By default WORLD_SIZE of the environment,
            which torchrun sets; `wrap_model` checks against the mesh.
        auto: values for the keys that are `"auto"` in the config, by the key's path with dots, its last part, or, for
            `block.enabled`, the block. `hidden_size` fills the three sizes that transformers derives from it.

    Raises:
        ConfigError: a key is unknown or unsupported, a value is impossible, two keys contradict each other, or an
            "auto" is left. The text names the key.
    """
    filled = fill_auto(load_config(cfg), auto)
    config = validate(filled)
    zero = config.zero_optimization
    mode, dtype_name = _mode(config)
    comm, buffers = config.communication_data_type, config.data_types.buffer_dtype
    sizes = resolve_batch_sizes(
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, world_size
    )
    policy = Policy(
        mode=mode,
        low_dtype=None if dtype_name is None else DTYPE_BY_NAME[dtype_name],
        lower_precision_safe_modules=_safe_modules(config),
        stage=zero.stage,
        communication_data_type=None if comm is None else DTYPE_BY_NAME[comm],
        reduce_accumulate_dtype=config.zeroamp.reduce_accumulate_dtype,
        external_autocast=config.zeroamp.external_autocast,
        grad_accum_dtype=_accumulation_dtype(config),
        loss_scale=_loss_scale(config.fp16) if dtype_name in _FLOAT16 else NO_LOSS_SCALE,
        count_traffic=_count_traffic(config),
        ranges=config.zeroamp.ranges,
        recovery=config.zeroamp.recovery,
        share_casts=config.zeroamp.share_casts,
        reduce_scatter_input_buffers=config.zeroamp.reduce_scatter_input_buffers,
        separate_reduce_scatter_group=config.zeroamp.separate_reduce_scatter_group,
        train_batch_size=sizes.total,
        train_micro_batch_size_per_gpu=sizes.micro,
        gradient_accumulation_steps=sizes.accumulation_steps,
        gradient_clipping=config.gradient_clipping,
        keep_in_fp32_modules=config.data_types.keep_in_fp32_modules,
        buffer_dtype=None if buffers is None else DTYPE_BY_NAME[buffers],
        check_grad_overflow=mode == "bf16" and config.bf16.check_grad_overflow,
        param_persistence_threshold=zero.stage3_param_persistence_threshold,
        hpz_partition_size=zero.zero_hpz_partition_size,
        dp_replicate_size=config.zeroamp.dp_replicate_size,
        max_live_parameters=zero.stage3_max_live_parameters,
        prefetch_bucket_size=zero.stage3_prefetch_bucket_size,
        reduce_bucket_size=zero.reduce_bucket_size,
        leaf_modules=_leaf_modules(config),
        offload=_offload(config),
        gather_16bit_weights_on_save=zero.stage3_gather_16bit_weights_on_model_save,
        steps_per_print=config.steps_per_print or 0,
        wall_clock_breakdown=config.wall_clock_breakdown,
        tensorboard=config.tensorboard if config.tensorboard.enabled else None,
        csv_monitor=config.csv_monitor if config.csv_monitor.enabled else None,
        wandb=config.wandb if config.wandb.enabled else None,
        optimizer=config.optimizer,
        scheduler=config.scheduler,
        given=tuple(flatten(filled).items()),
    )
    check_policy(policy)
    check_param_dtype(config, policy)
    return policy


def refuse_inconsistent(policy: Policy) -> None:
    """Check a policy that may have been built or changed by hand: it must be what its own config says.

    Fields that the policy's mode does not read may hold anything, and so may sizes of batches, which depend on ranks.

    Raises:
        ConfigError: the config would be refused, or makes another policy.
    """
    # A batch size would be derived for the ranks of this job, and may have been for others.
    asked = replace(policy, train_batch_size=None, train_micro_batch_size_per_gpu=None)
    made = policy_from_config(asked.to_config(), world_size=1)
    unread = {"lower_precision_safe_modules": policy.mode != "autocast", "offload": not policy.offload.to_cpu}
    for name in (field.name for field in fields(policy) if field.compare and not unread.get(field.name)):
        found, valid = getattr(asked, name), getattr(made, name)
        if found != valid:
            remedy = "Change the config, or all the fields that belong together."
            raise ConfigError(describe(f"Policy.{name}", repr(found), f"{valid!r}, as the other fields say", remedy))


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


def _safe_modules(config: Config) -> tuple[str, ...] | Literal["auto"]:
    block = config.torch_autocast
    if not block.enabled:
        return ()
    named = block.lower_precision_safe_modules
    return DEFAULT_SAFE_MODULES if named is None else named


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


def _count_traffic(config: Config) -> bool:
    ours, deepspeed = config.zeroamp.count_traffic, config.comms_logger.enabled
    if ours is not None and deepspeed is not None and ours != deepspeed:
        raise ConfigError(
            describe(
                "comms_logger.enabled",
                f"{deepspeed} beside zeroamp.count_traffic {ours}",
                "one of the two keys, or both alike",
                "Remove one of them.",
            )
        )
    return next((asked for asked in (ours, deepspeed) if asked is not None), True)


def _leaf_modules(config: Config) -> LeafModules:
    block = config.zero_optimization.leaf_module
    if block is None:
        return NO_LEAF_MODULES
    return LeafModules(classes=block.classes, names=block.names, name_suffixes=block.name_suffixes)


def _offload(config: Config) -> Offload:
    zero = config.zero_optimization
    blocks = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
    pins = set()
    for name, block in blocks.items():
        if block is None or block.device == "none":
            continue
        key = f"zero_optimization.{name}.device"
        if name == "offload_param" and zero.stage != 3:
            found = f'"cpu" at stage {zero.stage}'
            raise ConfigError(describe(key, found, '"none", or stage 3', "offload_optimizer is for the others."))
        pins.add(block.pin_memory)
    if len(pins) > 1:
        found = "another value than zero_optimization.offload_param.pin_memory"
        key = "zero_optimization.offload_optimizer.pin_memory"
        raise ConfigError(describe(key, found, "the same value twice", "FSDP2 offloads both together."))
    return Offload(to_cpu=True, pin_memory=pins.pop()) if pins else NO_OFFLOAD
