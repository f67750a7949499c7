"""What the strategies for Fabric and for Trainer share: arguments, policy, sharded checkpoints, views of optimizers.

| `precision=` | config without a precision block | config with one |
|---|---|---|
| none, "32-true" | fp32 | the config's |
| "bf16-mixed", "16-mixed" | `torch_autocast` in bfloat16 or float16 | must have the same low dtype |
| others | refused | refused |

[Note: Views of optimizers]
A loop of Lightning calls `optimizer.zero_grad()`. That would release sharded gradients without the `TrainStep`, and
could not release unsharded ones. So Lightning gets a view of each optimizer: another object, of a subclass, that shares
the optimizer's attributes and whose `zero_grad` calls the driver. The `TrainStep` and checkpoints use the optimizer
itself.

[Note: Checkpoints]
A sharded checkpoint is a folder of `save_checkpoint`, which all ranks write. It holds Lightning's own values as
`extra`. Weights alone are a file with whole tensors, as DDP's: Lightning writes and reads it.
"""

import io
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.integrations.config_values import (
    ConfigOrPolicy,
    KnownValues,
    Precision,
    fill_config,
    refuse_other_precision,
)
from zeroamp.integrations.loop_driver import LoopDriver
from zeroamp.policies.auto_wrap import AutoWrapPolicy
from zeroamp.policies.errors import CheckpointError, ConfigError
from zeroamp.policies.policy import Policy, policy_from_config
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.state import reshard

# `SharedStrategy` comes before the strategy of Fabric or of Trainer: DDP's processes, ranks and reductions are used.
_DDP: Any = DDPStrategy if TYPE_CHECKING else object

_MIXED: Mapping[str, Precision | None] = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""Lightning's name of a precision -> accelerate's; None: the config decides."""
_STARTING = {
    "accelerator", "parallel_devices", "cluster_environment", "process_group_backend", "timeout", "start_method",
}  # fmt: skip
"""Arguments of Lightning's `DDPStrategy` for starting processes."""
_RAW = "_zeroamp_raw_optimizer"
_EXTRA = "lightning"


class SharedStrategy(_DDP):  # type: ignore[misc]
    """The parts of a strategy that do not depend on whether Fabric or Trainer calls it."""

    mixed: str = "32-true"
    """Lightning's name of the precision."""

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
            ConfigError: a config and a stage are given, or an argument is for DDP only.
        """
        if unknown := sorted(starting.keys() - _STARTING):
            raise ConfigError(f"ZeroampStrategy has no argument {', '.join(unknown)}. Remove it.")
        if stage is not None and config is not None:
            raise ConfigError("ZeroampStrategy got a config and a stage. Set zero_optimization.stage in the config.")
        self._config = {"zero_optimization": {"stage": 3 if stage is None else stage}} if config is None else config
        self.wrap_arguments = {"auto_wrap_policy": auto_wrap_policy, "example_inputs": example_inputs}
        super().__init__(**starting)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "zeroamp" (stage 3) and "zeroamp_stage_0" to "zeroamp_stage_3"."""
        strategy_registry.register("zeroamp", cls, description="zeroamp at ZeRO stage 3", override=True)
        for stage in range(4):
            text = f"zeroamp at ZeRO stage {stage}"
            strategy_registry.register(f"zeroamp_stage_{stage}", cls, description=text, override=True, stage=stage)

    def take_precision(self, plugin: FabricPrecision) -> None:
        """Take the precision of a plugin of Lightning.

        Raises:
            ConfigError: it is neither "32-true" nor mixed precision.
        """
        self.mixed = str(getattr(plugin, "precision", "32-true"))
        if self.mixed not in _MIXED:
            raise ConfigError(
                f"The precision of a zeroamp strategy must be 32-true (the config decides), bf16-mixed or 16-mixed, "
                f"but is {self.mixed} ({type(plugin).__name__}). Parameters are stored as fp32 shards (master "
                'weights). Leave precision out, and write "bf16": {"enabled": true} in the config: parameters are '
                "then all-gathered and used in low precision."
            )

    def policy_of(self, known: KnownValues, arguments: str, *, world_size: int | None) -> Policy:
        """Return the policy from the config and Lightning's arguments.

        `zeroamp.sync_module_states` is true by default: ranks get the first rank's parameters, as with DDP.

        Args:
            known: values of config keys that Lightning's arguments set.
            arguments: whose arguments these are, for errors.
            world_size: the number of ranks, for batch sizes; None if unknown.

        Raises:
            ConfigError: the config is invalid, or contradicts the arguments.
        """
        precision = _MIXED[self.mixed]
        config = fill_config(self._config, known, precision=precision, arguments=arguments)
        config["zeroamp"] = {"sync_module_states": True} | config.get("zeroamp", {})
        policy = policy_from_config(config, world_size=world_size)
        refuse_other_precision(policy, precision, f'precision="{self.mixed}"')
        if policy.reproducible:
            # The first forward would draw random numbers before there is a TrainStep that seeds them.
            raise ConfigError(
                "zeroamp.reproducible must not be true with Lightning's Trainer and Fabric: they count micro-batches "
                "and divide losses themselves. Remove the key, or train with zeroamp.TrainStep, accelerate or "
                "transformers' Trainer."
            )
        return policy


class ConfigPrecision(PrecisionPlugin):
    """A precision plugin that enters the config's autocast around steps."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.precision = strategy.mixed

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the config's autocast. It does not cache casts, since parameters may be updated inside it."""
        policy = self.strategy.policy
        if policy.mode != "autocast":
            return nullcontext()
        return torch.autocast(self.strategy.root_device.type, dtype=policy.param_dtype, cache_enabled=False)


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


def run_backward(driver: LoopDriver, loss: torch.Tensor) -> None:
    """Run `LoopDriver.backward`. The loop has divided the loss by the number of micro-batches."""
    driver.backward(loss)
    torch.clear_autocast_cache()  # the graphs of casts in the loop's own autocast are released


def raw_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer behind a view or Lightning's wrapper of one, or the optimizer itself."""
    inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    raw: Optimizer = vars(inner).get(_RAW, inner)
    return raw


def view_of(optimizer: Optimizer, driver: LoopDriver) -> Optimizer:
    """Return a view of `optimizer` whose `zero_grad` calls the driver: see [Note: Views of optimizers]."""

    def zero_grad(_view: Any, set_to_none: bool = True) -> None:
        del set_to_none  # gradients are always released
        driver.zero_grad(optimizer)

    def load_state_dict(_view: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)  # a hook of `TrainStep` shards it

    cls, methods = type(optimizer), {"zero_grad": zero_grad, "load_state_dict": load_state_dict}
    view: Optimizer = object.__new__(type(cls.__name__, (cls,), methods))
    vars(optimizer)[_RAW] = optimizer
    view.__dict__ = vars(optimizer)
    return view


def save_sharded(path: Any, root: nn.Module, train: TrainStep, rest: Mapping[str, Any]) -> None:
    """Write a checkpoint folder: see [Note: Checkpoints]. All ranks call it, with the same `rest` for `torch.save`.

    Raises:
        CheckpointError: the path is a URL, or a rank cannot write.
    """
    if "://" in str(path):
        raise CheckpointError(f"{path} is a URL. zeroamp writes local files: pass a path that all ranks see.")
    file = io.BytesIO()
    torch.save(dict(rest), file)
    packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    save_checkpoint(path, root, train, extra={_EXTRA: packed}, keep=1)


def load_sharded(path: Path, root: nn.Module, train: TrainStep | None, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint folder, and return the saved `rest`. `train` None: only the model is loaded."""
    extra = load_checkpoint(path, root, train, load_lr_scheduler_states=False, extra_rank=0)
    packed = extra.get(_EXTRA) if isinstance(extra, dict) else None
    if not isinstance(packed, torch.Tensor):
        raise CheckpointError(
            f"{path} was not saved by a Lightning strategy. Load it with zeroamp.load_checkpoint(folder, model, train)."
        )
    file = io.BytesIO(packed.numpy().tobytes())
    rest: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    return rest


def load_whole(root: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load whole tensors into the shards. Every rank passes the complete `state`."""
    reshard(root.modules())
    set_model_state_dict(root, dict(state), options=StateDictOptions(full_state_dict=True, strict=strict))
