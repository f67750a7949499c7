"""What the strategies for Fabric and for Trainer share: arguments, policy, checkpoints, views of optimizers.

| `precision=` | config without a precision block | config with one |
|---|---|---|
| none, "32-true" | fp32 | the config's |
| "bf16-mixed", "16-mixed" | `torch_autocast` in bfloat16 or float16, with Lightning's loss scale | must be the same |
| others, plugins | refused | refused |

[Note: Views of optimizers]
A loop of Lightning calls `optimizer.zero_grad()`. That would release sharded gradients without the `TrainStep`, and
could not release unsharded ones. So Lightning gets a view of each optimizer: another object, of a subclass, that shares
the optimizer's attributes and whose `zero_grad` calls the driver. The `TrainStep` and checkpoints use the optimizer
itself.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.optim import Optimizer

from zeroamp.integrations.config_values import (
    PRECISIONS,
    ConfigOrPolicy,
    fill_precision,
    flat_config,
    mismatches_of,
    refuse_mismatches,
)
from zeroamp.integrations.loop_driver import LoopDriver
from zeroamp.policies.auto_values import AUTO, open_auto_keys
from zeroamp.policies.auto_wrap import AutoWrapPolicy
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import CheckpointError, ConfigError, StepError, describe
from zeroamp.policies.json_values import nest
from zeroamp.policies.policy import Policy, policy_from_config
from zeroamp.wrapping.state import wrap_state

# `_Shared` comes before the strategy of Fabric or of Trainer: DDP's processes, ranks, barriers and reductions are used.
_DDP: Any = DDPStrategy if TYPE_CHECKING else object

Mixed = Literal["bf16-mixed", "16-mixed"]

_NAMES = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_LOSS_SCALE = {"fp16.loss_scale_window": 2000, "fp16.hysteresis": 1}
"""Keys of `fp16` whose defaults differ from Lightning's `torch.amp.GradScaler` -> the values of that."""
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_STARTING = {
    "accelerator", "parallel_devices", "cluster_environment", "process_group_backend", "timeout", "start_method",
}  # fmt: skip
"""Arguments of Lightning's `DDPStrategy` for starting processes."""
_RAW = "_zeroamp_raw_optimizer"


class SharedStrategy(_DDP):  # type: ignore[misc]
    """The parts of a strategy that do not depend on whether Fabric or Trainer calls it."""

    _mixed: Mixed | None = None

    def __init__(
        self,
        config: ConfigOrPolicy | None = None,
        *,
        stage: int | None = None,
        auto_wrap_policy: AutoWrapPolicy = None,
        example_inputs: Any = None,
        **starting: Any,
    ) -> None:
        """Take a config, and Lightning's arguments for starting processes.

        Args:
            config: the path of a JSON file, a mapping, or a policy. None: stage 3, and `precision=`.
            stage: the ZeRO stage, if there is no config.
            auto_wrap_policy: see `zeroamp.wrap_model`.
            example_inputs: see `zeroamp.wrap_model`. With Trainer, the wrapped model is the LightningModule.
            starting: accelerator, parallel_devices, cluster_environment, process_group_backend, timeout and
                start_method of Lightning's `DDPStrategy`.

        Raises:
            ConfigError: the config is invalid, or contradicts Lightning's arguments, or an argument is for DDP only.
        """
        if unknown := sorted(starting.keys() - _STARTING):
            raise ConfigError(f"ZeroampStrategy has no argument {', '.join(unknown)}. Remove it.")
        if stage is not None and config is not None:
            raise ConfigError("ZeroampStrategy got a config and a stage. Set zero_optimization.stage in the config.")
        self._config, self._stage = config, stage
        self._wrap_arguments = {"auto_wrap_policy": auto_wrap_policy, "example_inputs": example_inputs}
        super().__init__(**starting)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "zeroamp" (stage 3) and "zeroamp_stage_0" to "zeroamp_stage_3"."""
        strategy_registry.register("zeroamp", cls, description="zeroamp at ZeRO stage 3", override=True)
        for stage in range(4):
            text = f"zeroamp at ZeRO stage {stage}"
            strategy_registry.register(f"zeroamp_stage_{stage}", cls, description=text, override=True, stage=stage)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that removes checkpoints. zeroamp writes them."""
        io: CheckpointIO = super().checkpoint_io
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise ConfigError(
            f"The plugin {type(io).__name__} (CheckpointIO) is not used: zeroamp writes checkpoints from all ranks. "
            "Remove it from plugins."
        )

    def autocast(self, policy: Policy) -> AbstractContextManager[Any]:
        """Return the config's autocast. It does not cache casts, since parameters may be updated inside it."""
        if policy.mode != "autocast":
            return nullcontext()
        return torch.autocast(self.root_device.type, dtype=policy.param_dtype, cache_enabled=False)

    def policy_of(
        self, *, world_size: int | None, accumulation: int | None = None, clipping: float | None = None
    ) -> Policy:
        """Return the policy from the config and Lightning's arguments.

        `zeroamp.sync_module_states` is true by default: ranks get the first rank's parameters, as with DDP.

        Args:
            world_size: the number of ranks, for batch sizes.
            accumulation: micro-batches per optimizer step, if the Trainer counts them.
            clipping: the largest gradient norm, if the Trainer has one.

        Raises:
            ConfigError: the config is invalid, or contradicts the arguments.
        """
        known = {
            "gradient_accumulation_steps": ("accumulate_grad_batches", accumulation),
            "gradient_clipping": ("gradient_clip_val", clipping),
        }
        known = {path: named for path, named in known.items() if named[1] is not None}
        if isinstance(self._config, Policy):
            refuse_mismatches(mismatches_of(dict(self._config.given), known), "the arguments of the Trainer")
            return self._of_precision(self._config)
        flat = flat_config({} if self._config is None else self._config)
        if self._config is None:
            flat["zero_optimization.stage"] = 3 if self._stage is None else self._stage
        has_loss_scale = any(path.startswith("fp16.") for path in flat)
        if self._mixed is not None:
            fill_precision(flat, PRECISIONS[_dtype_of(self._mixed)])
        if self._mixed == "16-mixed" and not has_loss_scale:
            flat |= _LOSS_SCALE
        refuse_mismatches(mismatches_of(flat, known), "the arguments of the Trainer")
        for path, default in (("gradient_accumulation_steps", 1), ("gradient_clipping", 0.0)):
            if path in known or flat.get(path) == AUTO:
                flat[path] = known[path][1] if path in known else default
        flat.setdefault("zeroamp.sync_module_states", True)  # as with DDP: Lightning's loops may not seed
        for path in _BATCH_SIZES:  # Lightning's data loaders decide them; given values are only checked
            if flat.get(path) == AUTO:
                del flat[path]
        if left := open_auto_keys(nest(flat)):
            raise ConfigError(
                f'{next(iter(left))} is "auto", but Lightning has no value for it. Write the value, or pass the '
                f"strategy zeroamp.policy_from_config(cfg, {next(iter(left.values()))[1]}=...)."
            )
        # Without a total batch size, the number of ranks is not needed.
        return self._of_precision(
            policy_from_config(nest(flat), world_size=world_size if "train_batch_size" in flat else None)
        )

    def _of_precision(self, policy: Policy) -> Policy:
        """Return a policy that agrees with `precision=`. Raise ConfigError otherwise."""
        if self._mixed is None or (policy.mode == "autocast" and policy.low_dtype == _dtype_of(self._mixed)):
            return policy
        found = "fp32" if policy.low_dtype is None else f"{policy.mode} in {short_name(policy.low_dtype)}"
        hint = "" if self._mixed == "16-mixed" else ' (on CPUs, Lightning turns "16-mixed" into "bf16-mixed")'
        raise ConfigError(
            f'precision="{self._mixed}" is torch.autocast in {short_name(_dtype_of(self._mixed))}{hint}, but the '
            f"config sets {found}. Leave precision out, so that the config decides, or set torch_autocast in the "
            "config."
        )


def _dtype_of(mixed: Mixed) -> torch.dtype:
    return torch.bfloat16 if mixed == "bf16-mixed" else torch.float16


def mixed_precision_of(plugin: FabricPrecision | None) -> Mixed | None:
    """Return the mixed precision of a precision plugin of Lightning, or None for "32-true".

    Raises:
        ConfigError: the plugin has another precision.
    """
    if plugin is None or type(plugin) in (FabricPrecision, Precision):
        return None
    if type(plugin) in (FabricMixedPrecision, MixedPrecision) and plugin.precision in _NAMES:
        _refuse_own_scaler(plugin)
        mixed: Mixed = "bf16-mixed" if plugin.precision == "bf16-mixed" else "16-mixed"
        return mixed
    raise ConfigError(
        f"The precision of a zeroamp strategy must be 32-true (the config decides), bf16-mixed or 16-mixed, but is "
        f"{getattr(plugin, 'precision', '?')} ({type(plugin).__name__}). Parameters are stored as fp32 shards (master "
        'weights). Leave precision out, and write "bf16": {"enabled": true} in the config: parameters are then '
        "all-gathered and used in low precision."
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


class ForwardModule(nn.Module):
    """Calls the wrapped model. Lightning needs a module other than the model for redirecting methods."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, with its hooks."""
        return self.module(*args, **kwargs)


def root_of(module: nn.Module) -> nn.Module:
    """Return the wrapped model inside a `ForwardModule`, or the module itself."""
    return module.module if isinstance(module, ForwardModule) else module


def driver_for(root: nn.Module, how_to_accumulate: str) -> LoopDriver:
    """Return the driver of a wrapped model.

    Raises:
        StepError: the config has `zeroamp.reproducible`.
    """
    if wrap_state(root).plan.policy.reproducible:
        # The first forward would draw random numbers before there is a TrainStep that seeds them.
        raise StepError(
            "zeroamp.reproducible must not be true with Lightning's Trainer and Fabric: they count micro-batches and "
            "divide losses themselves. Remove the key, or train with zeroamp.TrainStep, accelerate or transformers' "
            "Trainer."
        )
    return LoopDriver(root, how_to_accumulate)


def run_backward(driver: LoopDriver, loss: torch.Tensor) -> None:
    """Run `LoopDriver.backward`. The loop has divided the loss by the number of micro-batches."""
    driver.backward(loss)
    torch.clear_autocast_cache()  # the graphs of casts in the loop's own autocast are released


def clip_norm(driver: LoopDriver, max_norm: float, optimizer: Optimizer | None) -> torch.Tensor:
    """Run `LoopDriver.clip_norm`. Raise StepError if the config clips to another norm."""
    limit = wrap_state(driver.root).plan.policy.gradient_clipping
    if limit not in (0, max_norm):
        raise StepError(
            f"Gradients cannot be clipped to a norm of {max_norm}, since gradient_clipping is {limit} in the config. "
            "Set only one of the two."
        )
    return driver.clip_norm(max_norm, optimizer)


def refuse_arguments(call: str, names: Any) -> None:
    """Raise StepError for arguments of `call` that `TrainStep` does not have."""
    if names:
        raise StepError(f"{call} got {', '.join(map(str, names))}, which TrainStep does not have. Remove it.")


def refuse_storage_options(options: Any) -> None:
    """Raise CheckpointError for options of a CheckpointIO plugin."""
    if options is not None:
        raise CheckpointError("storage_options are for CheckpointIO plugins, which are not used. Remove them.")


def raw_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer behind a view or Lightning's wrapper of one, or the optimizer itself."""
    inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    raw: Optimizer = vars(inner).get(_RAW, inner)
    return raw


def view_of(optimizer: Optimizer, driver: LoopDriver) -> Optimizer:
    """Return a view of `optimizer` whose `zero_grad` calls the driver: see [Note: Views of optimizers]."""

    def zero_grad(_view: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            raise StepError(
                describe("set_to_none of zero_grad", "False", "True", "Leave it out: TrainStep releases gradients.")
            )
        driver.zero_grad(optimizer)

    cls = type(optimizer)
    view: Optimizer = object.__new__(type(cls.__name__, (cls,), {"zero_grad": zero_grad}))
    vars(optimizer)[_RAW] = optimizer
    view.__dict__ = vars(optimizer)
    return view
