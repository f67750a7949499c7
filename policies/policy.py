"""`Policy`, what a validated config asks for as plain values, and `policy_from_config`, which makes it.

Each key is defined once, in `zeroamp.policies.schema`: its type, default, class and note. `_policy_of` decides which
field of a policy has its value. Code outside of `policies` reads the fields.

A policy does not depend on a model or on a process group.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from zeroamp.policies.batch_sizes import BATCH_SIZES, data_parallel_ranks, resolve_batch_sizes
from zeroamp.policies.conflicts import check_policy
from zeroamp.policies.derived import (
    Mode,
    Offload,
    loss_scale_of,
    low_dtype_of,
    mode_of,
    offload_between_steps_of,
    offload_of,
    states_dtype_of,
    unread,
)
from zeroamp.policies.dtypes import FLOAT8_BY_NAME
from zeroamp.policies.json_values import flatten, json_object, json_value, load_config, nest
from zeroamp.policies.key_names import path_of_key, rename_keys
from zeroamp.policies.loss_scale_rule import LossScale
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES
from zeroamp.policies.schema.config import Config, OptimizerBlock, SchedulerBlock, validate
from zeroamp.policies.schema.keys import Honoured, iter_keys
from zeroamp.policies.schema.precision import OverrideBlock
from zeroamp.policies.schema.zero import LeafModuleBlock
from zeroamp.policies.schema.zero import Stage as Stage

LeafModules = LeafModuleBlock
"""Modules that are one unit each, with no unit inside: sparse experts, of which a forward runs only some."""

NO_LEAF_MODULES = LeafModules()


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """Precision, sharding stage and optimizer step of a training run. Made by `policy_from_config`.

    Two policies are equal if their fields are, except for the first three. So a key without an effect makes no
    difference. `str(policy)` is the JSON text of the config. `replace` returns a policy with other values of keys.
    """

    config: Config = field(compare=False)
    """All keys of the config, with the defaults of those that it does not have."""

    given: tuple[tuple[str, Any], ...] = field(compare=False)
    """(path with dots, value) of the keys that the config has."""

    num_ranks: int | None = field(compare=False)
    """Data-parallel ranks, by the caller, the launcher or the batch sizes; None if unknown."""

    mode: Mode
    """The precision mode. The sharded parameters and the optimizer state are fp32 in every mode.

    "autocast": per-op precision of `torch.autocast`; safe parameters are all-gathered in the low dtype. "bf16",
    "fp16": all parameters are all-gathered, and all ops computed, in that dtype. "fp32": no mixed precision.
    """

    low_dtype: torch.dtype | None
    """The low precision of the mode: bfloat16 or float16; None for mode "fp32"."""

    lower_precision_safe_modules: tuple[str, ...] | Literal["auto"]
    """Names of the classes whose parameters are safe. "auto": a traced run finds the safe parameters.

    See `discover_safe_parameters`. Empty in other modes than "autocast".
    """

    loss_scale: LossScale
    """The settings of loss scaling; `NO_LOSS_SCALE` unless the mode computes in float16."""

    offload: Offload
    """The device of the shards: see `Offload`."""

    # Keys of the config, which their notes in the schema describe (docs/config.md).
    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int
    gradient_clipping: float
    communication_data_type: torch.dtype | None
    grad_accum_dtype: torch.dtype
    optimizer_states_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    keep_in_fp32_modules: tuple[str, ...] | Literal["auto"]
    check_grad_overflow: bool
    stage: Stage
    param_persistence_threshold: int
    max_live_parameters: int
    prefetch_bucket_size: int
    hpz_partition_size: int
    leaf_modules: LeafModules
    gather_16bit_weights_on_save: bool
    reduce_accumulate_dtype: Literal["fp32", "native"]
    param_gather_dtype: torch.dtype | None
    overrides: tuple[OverrideBlock, ...]
    keep_inputs_in_fp32: tuple[str, ...]
    external_autocast: Literal["error", "allow"]
    offload_between_steps: tuple[Literal["optimizer"], ...]
    dp_replicate_size: int
    ranks_per_node: Literal["auto", "off"] | int
    partials_between_nodes: Literal["fp32", "bf16"]
    reduce: Literal["mean", "sum"]
    skip_nonfinite_steps: bool
    reproducible: bool
    seed: int
    sync_module_states: bool
    shard_dim: Literal["auto", 0]
    own_units: bool
    optional_units: tuple[str, ...]
    steps_per_print: int
    optimizer: OptimizerBlock | None
    scheduler: SchedulerBlock | None

    is_of_pipeline: bool = field(default=False, compare=False)
    """Whether the policy is that of a part of a pipeline, whose schedule sums micro-batches unsharded at all stages.
    `wrap_model` sets it."""

    @property
    def param_dtype(self) -> torch.dtype:
        """FSDP2's `param_dtype` of low-precision parameters, the dtype of their all-gather (fp32 in mode "fp32")."""
        return self.low_dtype or torch.float32

    @property
    def communication_dtype(self) -> torch.dtype:
        """Communication dtype of the gradients of low-precision parameters; in mode "fp32", of all parameters.

        At stage 0 it is used only with `reduce_accumulate_dtype` "native". Otherwise stage 0 communicates in fp32.
        """
        return self.communication_data_type or self.param_dtype

    @property
    def export_dtype(self) -> torch.dtype:
        """Dtype in which `zeroamp.export_hf` writes parameters if its caller passes none."""
        return self.param_dtype if self.gather_16bit_weights_on_save else torch.float32

    def replace(self, **changes: Any) -> "Policy":
        """Return a policy with other values for some keys: `policy.replace(stage=2)`.

        Name a key as in `policy_from_config`: `zero_optimization.stage`, `zero_optimization__stage`, `stage`; `bf16`
        for `bf16.enabled`. None removes a key. Batch sizes that were derived are derived again, for the same number of
        ranks. All checks run again.

        Raises:
            ConfigError: no key, or more than one, has the name; a value is not valid; or two keys contradict each
                other.
        """
        flat = dict(self.given)
        for name, value in changes.items():
            path = path_of_key(name, value)
            flat = {other: held for other, held in flat.items() if not (_is_in(other, path) or _is_in(path, other))}
            flat |= {} if value is None else rename_keys(flatten({path: json_value(value, path)}))
        return _policy_of(flat, self.num_ranks)

    __replace__ = replace

    def __str__(self) -> str:
        """Return `to_config` as JSON text."""
        return json.dumps(self.to_config(), indent=2)

    def __repr__(self) -> str:
        """Return a call that makes an equal policy."""
        return f"policy_from_config({self.to_config()!r})"

    def to_config(self) -> dict[str, Any]:
        """Return the config as it was given, from which `policy_from_config` makes an equal policy.

        "auto" values are filled. If it has a batch size, those that were derived are written out.
        """
        flat = dict(self.given)
        if flat.keys() & set(BATCH_SIZES):
            derived = ((name, getattr(self, name)) for name in BATCH_SIZES)
            flat |= {name: value for name, value in derived if value is not None}
        if "steps_per_print" in flat:
            flat["steps_per_print"] = self.steps_per_print  # may be infinite in the config: JSON has no such number
        return json_object(nest(flat), "config")

    def effective_values(self) -> dict[str, Any]:
        """Return {path: value} of the honoured keys that may have an effect, with defaults, as JSON's types.

        Batch sizes are the derived ones. Keys of a block that the config does not have are left out.
        """
        held = flatten(self.config.model_dump(mode="json")) | {name: getattr(self, name) for name in BATCH_SIZES}
        honoured = (key.path for key in iter_keys(Config) if isinstance(key.key_class, Honoured))
        # `optimizer.params` is one key, whose block depends on the type.
        read = {path for path in honoured if unread(path, self.config) is None}
        return {path: value for path, value in held.items() if read & {path, path.rpartition(".")[0]}}

    def report(self, *, defaults: bool = False) -> str:
        """Return a text that lists each key of the config with its status and its note.

        The status is honoured, native (accepted, without effect), off, or without effect in this config.

        Args:
            defaults: whether to list also the keys that the config does not have and whose defaults have an effect.
        """
        from zeroamp.reporting.key_report import render_report

        return render_report(self, defaults=defaults)


def _is_in(path: str, block: str) -> bool:
    """Return whether the key `path` is `block` itself or in that block."""
    return f"{path}.".startswith(f"{block}.")


ConfigLike = Mapping[str, Any] | str | os.PathLike[str]
"""A config, or the path of a JSON file."""


def as_policy(policy: Policy | ConfigLike) -> Policy:
    """Return `policy`, or the policy of a config. Raises ConfigError as `policy_from_config` does."""
    return policy if isinstance(policy, Policy) else policy_from_config(policy)


def policy_from_config(cfg: ConfigLike, *, world_size: int | None = None, **auto: Any) -> Policy:
    """Read a DeepSpeed-style config and return its `Policy`.

    Every key is honoured, native (accepted, without effect), or raises an error: docs/config.md lists the keys.

    Args:
        cfg: a mapping, or the path of a JSON file.
        world_size: the number of data-parallel ranks, with which batch sizes are derived and checked. By default
            WORLD_SIZE of the environment, which torchrun sets. `wrap_model` checks the sizes with the mesh.
        auto: values for the keys that are `"auto"` in the config. Each is named by the key's path with dots (or with
            `__` for each dot), by its last part, or, for `block.enabled`, by the block. `hidden_size` fills the three
            sizes that transformers derives from it, and `lr` also `scheduler.params.warmup_max_lr`.

    Raises:
        ConfigError: a key is unknown or unsupported, a value is not valid, two keys contradict each other, or an "auto"
            is not filled, or WORLD_SIZE in the environment is not a whole number from 1 on. The text names the key or
            the variable.

    Examples:
        >>> config = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
        >>> policy = zeroamp.policy_from_config(config, bf16=True)
        >>> policy.mode, policy.stage
        ('bf16', 2)
        >>> policy.replace(stage=3)
        policy_from_config({'bf16': {'enabled': True}, 'zero_optimization': {'stage': 3}})
        >>> zeroamp.policy_from_config({"zero_optimisation": {"stage": 2}})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        zeroamp.policies.errors.ConfigError: ...Did you mean 'zero_optimization'?...
    """
    flat = rename_keys(flatten(load_config(cfg)))
    if auto or "auto" in flat.values():
        from zeroamp.policies.auto_values import fill_auto

        flat = fill_auto(flat, auto)
    return _policy_of(flat, data_parallel_ranks(world_size))


def _policy_of(flat: Mapping[str, Any], num_ranks: int | None) -> Policy:
    """Return the policy of a config, {path: value}. Here is decided what each key means for those who read a policy."""
    config = validate(nest(flat))
    mode, low_dtype = mode_of(config), low_dtype_of(config)
    autocast, types, zero, ours = config.torch_autocast, config.data_types, config.zero_optimization, config.zeroamp
    safe_modules = autocast.lower_precision_safe_modules if mode == "autocast" else ()
    total, micro, steps = resolve_batch_sizes(
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, num_ranks
    )
    if num_ranks is None and total is not None and micro is not None:
        num_ranks = total // (micro * steps)
    policy = Policy(
        config=config,
        given=tuple(flat.items()),
        num_ranks=num_ranks,
        mode=mode,
        low_dtype=low_dtype,
        lower_precision_safe_modules=DEFAULT_SAFE_MODULES if safe_modules is None else safe_modules,
        loss_scale=loss_scale_of(config),
        offload=offload_of(config),
        train_batch_size=total,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
        gradient_clipping=config.gradient_clipping,
        communication_data_type=config.communication_data_type,
        grad_accum_dtype=types.grad_accum_dtype or torch.float32,
        optimizer_states_dtype=states_dtype_of(config),
        buffer_dtype=types.buffer_dtype,
        keep_in_fp32_modules=types.keep_in_fp32_modules,
        check_grad_overflow=config.bf16.enabled and config.bf16.check_grad_overflow,
        stage=zero.stage,
        param_persistence_threshold=zero.stage3_param_persistence_threshold,
        max_live_parameters=zero.stage3_max_live_parameters,
        prefetch_bucket_size=zero.stage3_prefetch_bucket_size,
        hpz_partition_size=zero.zero_hpz_partition_size,
        leaf_modules=zero.leaf_module or NO_LEAF_MODULES,
        gather_16bit_weights_on_save=zero.stage3_gather_16bit_weights_on_model_save,
        reduce_accumulate_dtype=ours.reduce_accumulate_dtype,
        param_gather_dtype=FLOAT8_BY_NAME.get(ours.param_gather_dtype or ""),
        overrides=ours.overrides,
        keep_inputs_in_fp32=ours.keep_inputs_in_fp32,
        external_autocast=ours.external_autocast,
        offload_between_steps=offload_between_steps_of(config),
        dp_replicate_size=ours.dp_replicate_size,
        ranks_per_node=ours.ranks_per_node,
        partials_between_nodes=ours.partials_between_nodes,
        reduce=ours.reduce,
        skip_nonfinite_steps=ours.skip_nonfinite_steps,
        reproducible=ours.reproducible,
        seed=ours.seed or 0,
        sync_module_states=ours.sync_module_states,
        shard_dim=ours.shard_dim,
        own_units=ours.own_units,
        optional_units=ours.optional_units,
        steps_per_print=config.steps_per_print or 0,
        optimizer=config.optimizer,
        scheduler=config.scheduler,
    )
    check_policy(policy)
    return policy
