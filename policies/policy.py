"""`Policy`, a frozen value of a validated config in its normal form, and `policy_from_config`, which makes it.

Each key is defined once, in `zeroamp.policies.schema`: its type, default, class and note. A policy contains the config
itself, so a new key is available as `policy.config.<block>.<key>`, with its type. It is also in `str(policy)`, in
`policy.report()`, in comparisons of policies and in the docs. The attributes below are for readers of a policy: values
of another shape than their key (`mode`, `loss_scale`, `offload`), and short names for keys that are read in many
places. A new key does not need one.

A policy does not depend on a model or on a process group.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, overload

import torch

from zeroamp.policies.batch_sizes import BATCH_SIZES, data_parallel_ranks
from zeroamp.policies.conflicts import check_policy
from zeroamp.policies.dtypes import FLOAT8_BY_NAME
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.json_values import flatten, json_value, load_config, nest
from zeroamp.policies.key_names import path_of_key, rename_keys
from zeroamp.policies.loss_scale_rule import NO_LOSS_SCALE, LossScale
from zeroamp.policies.normalise import HELD_BY, low_dtype_of, mode_of, normalised, short_config, to_config
from zeroamp.policies.normalise import Mode as Mode
from zeroamp.policies.schema.config import Config, validate
from zeroamp.policies.schema.zero import LeafModuleBlock
from zeroamp.policies.schema.zero import Stage as Stage

_T = TypeVar("_T")

LeafModules = LeafModuleBlock
"""Modules that are one unit each, with no unit inside: sparse experts, of which a forward runs only some."""

NO_LEAF_MODULES = LeafModules()


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """The device of sharded parameters, their gradients and the optimizer state. FSDP2 offloads all three together."""

    to_cpu: bool = False
    """Whether the shards are on the CPU. Unsharded parameters are on the accelerator in any case."""

    pin_memory: bool = True
    """Whether the shards are in page-locked memory, so that copies overlap with compute. No effect on CPUs."""


NO_OFFLOAD = Offload()


class _Key(Generic[_T]):
    """An attribute of `Policy` that reads the config."""

    def __init__(self, read: Callable[[Config], _T]) -> None:
        self._read = read

    @overload
    def __get__(self, policy: None, owner: type) -> "_Key[_T]": ...
    @overload
    def __get__(self, policy: "Policy", owner: type) -> _T: ...
    def __get__(self, policy: "Policy | None", owner: type) -> "_Key[_T] | _T":
        return self if policy is None else self._read(policy.config)


@dataclass(frozen=True, init=False, slots=True, repr=False)
class Policy:
    """Precision, sharding stage and optimizer step of a training run. Made by `policy_from_config`.

    Policies of equivalent configs are equal. `str(policy)` is the JSON text of a config from which `policy_from_config`
    makes an equal policy. `replace` returns a policy with other values of keys.
    """

    config: Config
    """All keys, in the normal form of `zeroamp.policies.normalise`. Native and unsupported keys have their defaults."""

    given: tuple[tuple[str, Any], ...] = field(compare=False)
    """(path with dots, value) of the keys that the config had, for `report`. Comparisons of policies ignore it."""

    def __init__(
        self, config: Config | None = None, given: tuple[tuple[str, Any], ...] = (), *, num_ranks: int | None = None
    ) -> None:
        """Make a policy. Users call `policy_from_config`.

        Args:
            config: from `validate`. None stands for the defaults.
            given: see the attribute.
            num_ranks: data-parallel ranks, with which batch sizes are derived and checked; None if unknown.

        Raises:
            ConfigError: two keys contradict each other.
        """
        object.__setattr__(self, "config", normalised(Config() if config is None else config, num_ranks))
        object.__setattr__(self, "given", given)
        check_policy(self)

    def replace(self, **changes: Any) -> "Policy":
        """Return a policy with other values for some keys: `policy.replace(stage=2)`.

        A key is named as an argument of `policy_from_config` is: by its path with dots (or with `__` for each dot), by
        its last part, or, for `block.enabled`, by the block. None removes a key. Batch sizes that were derived are
        derived again, for the same number of ranks. All checks run again.

        Raises:
            ConfigError: no key, or more than one, has the name; a value is not valid; or two keys contradict each
                other.
        """
        flat = flatten(self.to_config())
        named = {path for path, _ in self.given}
        for name, value in changes.items():
            path = path_of_key(name, value)
            replaced = [path, *(held for key, held in HELD_BY.items() if _overlap(key, path) and not _any(held, named))]
            flat = {other: held for other, held in flat.items() if not any(_is_in(other, each) for each in replaced)}
            flat |= {} if value is None else rename_keys(flatten({path: json_value(value, path)}))
            named |= {other for other in flat if _is_in(other, path)}
        flat = {path: value for path, value in flat.items() if path in named or path not in BATCH_SIZES}
        given = tuple((path, value) for path, value in flat.items() if path in named)
        num_ranks = self._num_ranks if flat.keys() & BATCH_SIZES else None  # else there is nothing to derive
        return Policy(validate(nest(flat)), given, num_ranks=num_ranks)

    __replace__ = replace

    @property
    def _num_ranks(self) -> int | None:
        """The number of ranks that follows from the batch sizes, or without them from the environment."""
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        if total is None or micro is None:
            return data_parallel_ranks(None)
        return total // (micro * self.gradient_accumulation_steps)

    def __str__(self) -> str:
        """Return the config as JSON text, with defaults written out."""
        return json.dumps(self.to_config(), indent=2)

    def __repr__(self) -> str:
        """Return a call that makes an equal policy, with the keys that differ from their defaults."""
        return f"policy_from_config({short_config(self)!r})"

    def to_config(self) -> dict[str, Any]:
        """Return a config, with defaults written out, from which `policy_from_config` makes an equal policy."""
        return to_config(self)

    def report(self, *, defaults: bool = False) -> str:
        """Return a text that lists each key of the config with its status and its note.

        The status is honoured, native (accepted, without effect), off, or without effect in this config.

        Args:
            defaults: whether to list also the keys that the config does not have and whose defaults have an effect.
        """
        from zeroamp.reporting.key_report import render_report

        return render_report(self, defaults=defaults)

    # Short names of keys, which their notes in the schema describe (docs/config.md).
    train_batch_size = _Key(lambda config: config.train_batch_size)
    train_micro_batch_size_per_gpu = _Key(lambda config: config.train_micro_batch_size_per_gpu)
    gradient_accumulation_steps = _Key(lambda config: config.gradient_accumulation_steps or 1)
    gradient_clipping = _Key(lambda config: config.gradient_clipping)
    communication_data_type = _Key(lambda config: config.communication_data_type)
    grad_accum_dtype = _Key(lambda config: config.data_types.grad_accum_dtype or torch.float32)
    optimizer_states_dtype = _Key(
        lambda config: torch.bfloat16 if config.data_types.optimizer_states_dtype == "bf16" else None
    )
    buffer_dtype = _Key(lambda config: config.data_types.buffer_dtype)
    keep_in_fp32_modules = _Key(lambda config: config.data_types.keep_in_fp32_modules)
    check_grad_overflow = _Key(lambda config: config.bf16.check_grad_overflow)
    stage = _Key(lambda config: config.zero_optimization.stage)
    param_persistence_threshold = _Key(lambda config: config.zero_optimization.stage3_param_persistence_threshold)
    max_live_parameters = _Key(lambda config: config.zero_optimization.stage3_max_live_parameters)
    prefetch_bucket_size = _Key(lambda config: config.zero_optimization.stage3_prefetch_bucket_size)
    hpz_partition_size = _Key(lambda config: config.zero_optimization.zero_hpz_partition_size)
    leaf_modules = _Key(lambda config: config.zero_optimization.leaf_module or NO_LEAF_MODULES)
    gather_16bit_weights_on_save = _Key(
        lambda config: config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    )
    reduce_accumulate_dtype = _Key(lambda config: config.zeroamp.reduce_accumulate_dtype)
    param_gather_dtype = _Key(lambda config: FLOAT8_BY_NAME.get(config.zeroamp.param_gather_dtype or ""))
    overrides = _Key(lambda config: config.zeroamp.overrides)
    keep_inputs_in_fp32 = _Key(lambda config: config.zeroamp.keep_inputs_in_fp32)
    external_autocast = _Key(lambda config: config.zeroamp.external_autocast)
    offload_between_steps = _Key(lambda config: config.zeroamp.offload_between_steps)
    dp_replicate_size = _Key(lambda config: config.zeroamp.dp_replicate_size)
    ranks_per_node = _Key(lambda config: config.zeroamp.ranks_per_node)
    partials_between_nodes = _Key(lambda config: config.zeroamp.partials_between_nodes)
    reduce = _Key(lambda config: config.zeroamp.reduce)
    skip_nonfinite_steps = _Key(lambda config: config.zeroamp.skip_nonfinite_steps)
    reproducible = _Key(lambda config: config.zeroamp.reproducible)
    seed = _Key(lambda config: config.zeroamp.seed or 0)
    sync_module_states = _Key(lambda config: config.zeroamp.sync_module_states)
    shard_dim = _Key(lambda config: config.zeroamp.shard_dim)
    own_units = _Key(lambda config: config.zeroamp.own_units)
    steps_per_print = _Key(lambda config: config.steps_per_print or 0)
    optimizer = _Key(lambda config: config.optimizer)
    scheduler = _Key(lambda config: config.scheduler)

    @property
    def mode(self) -> Mode:
        """The precision mode. The sharded parameters and the optimizer state are fp32 in every mode.

        "autocast": per-op precision of `torch.autocast`; safe parameters are all-gathered in the low dtype. "bf16",
        "fp16": all parameters are all-gathered, and all ops computed, in that dtype. "fp32": no mixed precision.
        """
        return mode_of(self.config)

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The low precision of the mode: bfloat16 or float16; None for mode "fp32"."""
        return low_dtype_of(self.config)

    @property
    def lower_precision_safe_modules(self) -> tuple[str, ...] | Literal["auto"]:
        """Names of the classes whose parameters are safe. "auto": a traced run finds the safe parameters.

        See `discover_safe_parameters`. Empty in other modes than "autocast".
        """
        return self.config.torch_autocast.lower_precision_safe_modules or ()

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

    @property
    def loss_scale(self) -> LossScale:
        """The settings of loss scaling; `NO_LOSS_SCALE` unless the mode computes in float16."""
        block = self.config.fp16
        if self.low_dtype != torch.float16:
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

    @property
    def offload(self) -> Offload:
        """The device of the shards: see `Offload`."""
        block = self.config.zero_optimization.offload_param
        return NO_OFFLOAD if block is None else Offload(to_cpu=True, pin_memory=block.pin_memory)


def _is_in(path: str, block: str) -> bool:
    """Return whether the key `path` is `block` itself or in that block."""
    return f"{path}.".startswith(f"{block}.")


def _overlap(path: str, other: str) -> bool:
    return _is_in(path, other) or _is_in(other, path)


def _any(block: str, paths: set[str]) -> bool:
    return any(_is_in(path, block) for path in paths)


def _refuse_change(_: Policy, name: str, *_value: object) -> None:
    raise ConfigError(f"policy.{name} was set, but a Policy is frozen. Call policy.replace({name}=...) instead.")


# The methods of a frozen dataclass with slots raise a TypeError without a text for names that are not fields.
Policy.__setattr__ = _refuse_change  # type: ignore[method-assign, assignment]
Policy.__delattr__ = _refuse_change  # type: ignore[method-assign, assignment]


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
    filled = nest(flat)
    return Policy(validate(filled), tuple(flatten(filled).items()), num_ranks=data_parallel_ranks(world_size))
