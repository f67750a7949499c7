"""`Policy`: a config, validated and in its normal form, as one frozen value; and `policy_from_config`, which reads it.

A key stands in one place, `zeroamp.policies.schema`: its type, default, class and note. The policy holds the config
itself, so a new key is at once `policy.config.<block>.<key>`, typed, and in `str(policy)`, `policy.report()`, the
comparison of policies and the docs. The attributes below are for readers of the policy: values that have another
shape than their key (`mode`, `loss_scale`, `offload`), and short names for keys that are read in many places. A new
key needs none.

Nothing here knows a model or a process group.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, overload

import torch

from zeroamp.policies.auto_values import fill_auto, path_of_key, rename_keys
from zeroamp.policies.batch_sizes import BATCH_SIZES, data_parallel_ranks
from zeroamp.policies.conflicts import check_policy
from zeroamp.policies.dtypes import FLOAT8_BY_NAME
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.json_values import flatten, json_value, load_config, nest
from zeroamp.policies.loss_scale import NO_LOSS_SCALE, LossScale
from zeroamp.policies.normalise import HELD_BY, low_dtype_of, mode_of, normalised
from zeroamp.policies.normalise import Mode as Mode
from zeroamp.policies.render import render_report, short_config, to_config
from zeroamp.policies.schema import Config, validate
from zeroamp.policies.schema.config import RangeMode as RangeMode
from zeroamp.policies.schema.instruments import FileMonitorBlock, WandbBlock
from zeroamp.policies.schema.zero import LeafModuleBlock
from zeroamp.policies.schema.zero import Stage as Stage

_T = TypeVar("_T")

LeafModules = LeafModuleBlock
"""Modules that are unsharded whole, as one unit: sparse experts, of which a forward runs only some."""

NO_LEAF_MODULES = LeafModules()


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """Where the sharded parameters, their gradients and the optimizer state live: FSDP2 moves all three together."""

    to_cpu: bool = False
    """Unsharded copies stay on the accelerator; only shards move."""

    pin_memory: bool = True
    """Page-locked memory, which copies overlap with compute. Only where there is an accelerator."""


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
    """Precision, sharding stage and step of one training run, from `policy_from_config`.

    Policies are equal where their configs ask for the same. `str(policy)` is JSON, of a config that
    `policy_from_config` turns into an equal policy; `replace` changes keys.
    """

    config: Config
    """Every key, validated and normal: see `zeroamp.policies.normalise`. Native and unsupported keys have defaults."""

    given: tuple[tuple[str, Any], ...] = field(compare=False)
    """The keys that were given, with dots, and their values. For `report`; policies compare without."""

    def __init__(
        self, config: Config | None = None, given: tuple[tuple[str, Any], ...] = (), *, num_ranks: int | None = None
    ) -> None:
        """Take a config that `validate` returned, or none for the defaults. `num_ranks` derives and checks batch sizes.

        Raises:
            ConfigError: two keys contradict each other.
        """
        object.__setattr__(self, "config", normalised(Config() if config is None else config, num_ranks))
        object.__setattr__(self, "given", given)
        check_policy(self)

    def replace(self, **changes: Any) -> "Policy":
        """Return the policy of this config with other values for some keys: `policy.replace(stage=2)`.

        A key is named as the arguments of `policy_from_config` are: by its path with dots (or with `__` for each), its
        last part, or, for `block.enabled`, the block. None removes a key. Batch sizes that were derived are derived
        again, for the same number of ranks. All checks run again.

        Raises:
            ConfigError: no key, or more than one, has the name; a value is impossible; or two keys contradict each
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
        return Policy(validate(nest(flat)), given, num_ranks=self._num_ranks)

    __replace__ = replace

    @property
    def _num_ranks(self) -> int | None:
        """The number of ranks that the batch sizes imply, or else the environment's."""
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        if total is None or micro is None:
            return data_parallel_ranks(None)
        return total // (micro * self.gradient_accumulation_steps)

    def __str__(self) -> str:
        """Return the config as JSON, defaults written out."""
        return json.dumps(self.to_config(), indent=2)

    def __repr__(self) -> str:
        """Return the call that makes an equal policy, with the keys that differ from their defaults."""
        return f"policy_from_config({short_config(self)!r})"

    def to_config(self) -> dict[str, Any]:
        """Return the config, defaults written out, from which `policy_from_config` makes an equal policy."""
        return to_config(self)

    def report(self, *, defaults: bool = False) -> str:
        """Return what became of each key of the config, and what it means: honoured, native, off or without effect.

        Args:
            defaults: also list the keys that the config does not have and whose defaults act.
        """
        return render_report(self, defaults=defaults)

    # Short names of keys, which their notes in the schema describe (docs/config.md).
    train_batch_size = _Key(lambda config: config.train_batch_size)
    train_micro_batch_size_per_gpu = _Key(lambda config: config.train_micro_batch_size_per_gpu)
    gradient_accumulation_steps = _Key(lambda config: config.gradient_accumulation_steps or 1)
    gradient_clipping = _Key(lambda config: config.gradient_clipping)
    communication_data_type = _Key(lambda config: config.communication_data_type)
    grad_accum_dtype = _Key(lambda config: config.data_types.grad_accum_dtype or torch.float32)
    buffer_dtype = _Key(lambda config: config.data_types.buffer_dtype)
    keep_in_fp32_modules = _Key(lambda config: config.data_types.keep_in_fp32_modules)
    check_grad_overflow = _Key(lambda config: config.bf16.check_grad_overflow)
    stage = _Key(lambda config: config.zero_optimization.stage)
    param_persistence_threshold = _Key(lambda config: config.zero_optimization.stage3_param_persistence_threshold)
    max_live_parameters = _Key(lambda config: config.zero_optimization.stage3_max_live_parameters)
    prefetch_bucket_size = _Key(lambda config: config.zero_optimization.stage3_prefetch_bucket_size)
    reduce_bucket_size = _Key(lambda config: config.zero_optimization.reduce_bucket_size)
    hpz_partition_size = _Key(lambda config: config.zero_optimization.zero_hpz_partition_size)
    leaf_modules = _Key(lambda config: config.zero_optimization.leaf_module or NO_LEAF_MODULES)
    gather_16bit_weights_on_save = _Key(
        lambda config: config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    )
    reduce_accumulate_dtype = _Key(lambda config: config.zeroamp.reduce_accumulate_dtype)
    param_gather_dtype = _Key(lambda config: FLOAT8_BY_NAME.get(config.zeroamp.param_gather_dtype or ""))
    overrides = _Key(lambda config: config.zeroamp.overrides)
    external_autocast = _Key(lambda config: config.zeroamp.external_autocast)
    dp_replicate_size = _Key(lambda config: config.zeroamp.dp_replicate_size)
    ranks_per_node = _Key(lambda config: config.zeroamp.ranks_per_node)
    partials_between_nodes = _Key(lambda config: config.zeroamp.partials_between_nodes)
    count_traffic = _Key(lambda config: config.zeroamp.count_traffic is not False)
    ranges = _Key(lambda config: config.zeroamp.ranges)
    reduce = _Key(lambda config: config.zeroamp.reduce)
    skip_nonfinite_steps = _Key(lambda config: config.zeroamp.skip_nonfinite_steps)
    reproducible = _Key(lambda config: config.zeroamp.reproducible)
    seed = _Key(lambda config: config.zeroamp.seed or 0)
    sync_module_states = _Key(lambda config: config.zeroamp.sync_module_states)
    shard_dim = _Key(lambda config: config.zeroamp.shard_dim)
    recovery = _Key(lambda config: config.zeroamp.recovery)
    autocast_ops = _Key(lambda config: frozenset(config.zeroamp.autocast_ops))
    share_casts = _Key(lambda config: config.zeroamp.share_casts)
    own_units = _Key(lambda config: config.zeroamp.own_units)
    reduce_scatter_input_buffers = _Key(lambda config: config.zeroamp.reduce_scatter_input_buffers)
    separate_reduce_scatter_group = _Key(lambda config: config.zeroamp.separate_reduce_scatter_group)
    symmetric_memory = _Key(lambda config: config.zeroamp.symmetric_memory)
    steps_per_print = _Key(lambda config: config.steps_per_print or 0)
    wall_clock_breakdown = _Key(lambda config: config.wall_clock_breakdown)
    optimizer = _Key(lambda config: config.optimizer)
    scheduler = _Key(lambda config: config.scheduler)

    @property
    def mode(self) -> Mode:
        """How precision is mixed. The sharded parameters and the optimizer state are fp32 in every mode.

        "autocast": per-op precision of `torch.autocast`, safe parameters all-gathered in the low dtype. "bf16", "fp16":
        every parameter all-gathered and computed in that dtype. "fp32": no mixed precision.
        """
        return mode_of(self.config)

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The low precision of the mode: bfloat16 or float16; None for mode "fp32"."""
        return low_dtype_of(self.config)

    @property
    def lower_precision_safe_modules(self) -> tuple[str, ...] | Literal["auto"]:
        """Class names whose parameters are safe; "auto" finds out by a traced run, see `discover_safe_parameters`.

        Empty in other modes than "autocast".
        """
        return self.config.torch_autocast.lower_precision_safe_modules or ()

    @property
    def gather_dtype(self) -> torch.dtype:
        """FSDP2's param_dtype of low-precision parameters: the dtype of their all-gather (fp32 in mode "fp32")."""
        return self.low_dtype or torch.float32

    @property
    def wire_dtype(self) -> torch.dtype:
        """Communication dtype of the gradients of low-precision parameters at stages 1 to 3."""
        return self.communication_data_type or self.gather_dtype

    @property
    def export_dtype(self) -> torch.dtype:
        """Dtype in which `zeroamp.export_hf` writes parameters where its caller names none."""
        return self.gather_dtype if self.gather_16bit_weights_on_save else torch.float32

    @property
    def loss_scale(self) -> LossScale:
        """How the loss is scaled; `NO_LOSS_SCALE` unless something computes in float16."""
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
        """Whether shards live on the CPU."""
        block = self.config.zero_optimization.offload_optimizer
        return NO_OFFLOAD if block is None else Offload(to_cpu=True, pin_memory=block.pin_memory)

    @property
    def tensorboard(self) -> FileMonitorBlock | None:
        """Where `TrainStep` writes TensorBoard's event files; None: nowhere."""
        return self.config.tensorboard if self.config.tensorboard.enabled else None

    @property
    def csv_monitor(self) -> FileMonitorBlock | None:
        """Where `TrainStep` writes steps.csv; None: nowhere."""
        return self.config.csv_monitor if self.config.csv_monitor.enabled else None

    @property
    def wandb(self) -> WandbBlock | None:
        """The run of Weights & Biases that `TrainStep` logs to; None: none."""
        return self.config.wandb if self.config.wandb.enabled else None


def _is_in(path: str, block: str) -> bool:
    """Return whether a key is `block` itself, or in that block."""
    return f"{path}.".startswith(f"{block}.")


def _overlap(path: str, other: str) -> bool:
    return _is_in(path, other) or _is_in(other, path)


def _any(block: str, paths: set[str]) -> bool:
    return any(_is_in(path, block) for path in paths)


def _refuse_change(_: Policy, name: str, *_value: object) -> None:
    raise ConfigError(f"policy.{name} was set, but a Policy is frozen. policy.replace({name}=...) returns another one.")


# The methods of a frozen dataclass with slots raise a TypeError without a text for names that are not fields.
Policy.__setattr__ = _refuse_change  # type: ignore[method-assign, assignment]
Policy.__delattr__ = _refuse_change  # type: ignore[method-assign, assignment]


def policy_from_config(
    cfg: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int | None = None, **auto: Any
) -> Policy:
    """Read a DeepSpeed-style config. Every key is honoured, native (it changes nothing), or refused.

    Args:
        cfg: a mapping, or the path of a JSON file.
        world_size: data-parallel ranks, to derive and check batch sizes. By default WORLD_SIZE of the environment,
            which torchrun sets; `wrap_model` checks against the mesh.
        auto: values for the keys that are `"auto"` in the config, by the key's path with dots, its last part, or, for
            `block.enabled`, the block. `hidden_size` fills the three sizes that transformers derives from it.

    Raises:
        ConfigError: a key is unknown or unsupported, a value is impossible, two keys contradict each other, or an
            "auto" is left. The text names the key.

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
    filled = fill_auto(load_config(cfg), auto)
    return Policy(validate(filled), tuple(flatten(filled).items()), num_ranks=data_parallel_ranks(world_size))
