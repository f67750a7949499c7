"""`ZeroampStrategy` for `lightning.pytorch.Trainer`. Tested with lightning 2.6.6.

Importing this module registers "zeroamp" and "zeroamp_stage_0" to "zeroamp_stage_3" as names of strategies::

    import zeroamp.integrations.lightning
    Trainer(strategy="zeroamp_stage_2", precision="bf16-mixed")

    from zeroamp.integrations.lightning import ZeroampStrategy
    Trainer(strategy=ZeroampStrategy("config.json"))

| `precision=` | config without a precision block | config with one |
|---|---|---|
| none, "32-true" | fp32 | the config's |
| "bf16-mixed", "16-mixed" | `torch_autocast` in bfloat16 or float16 | must have the same low dtype |
| others | refused | refused |

The order of an optimizer step is Lightning's:

| what | who does it |
|---|---|
| forward, `zero_grad`, `on_before_backward` | Lightning |
| backward | `TrainStep.backward(loss, is_last=..., divide=False)` |
| `on_after_backward` | Lightning |
| gradients averaged over ranks, unscaled; norm | `TrainStep.clip_grad_norm(0)` |
| `on_before_optimizer_step` | hooks see gradients that are not clipped |
| `configure_gradient_clipping` | clips by `gradient_clip_val`, else by the config's `gradient_clipping` |
| update | `TrainStep.update` |

[Note: Views of optimizers]
A loop of Lightning calls `optimizer.zero_grad()`. That would release sharded gradients without the `TrainStep`, and
could not release unsharded ones. So Lightning gets a view of the optimizer: another object, of a subclass, that shares
the optimizer's attributes and whose `zero_grad` calls the driver. The `TrainStep` and checkpoints use the optimizer
itself.

[Note: Checkpoints]
A sharded checkpoint is a folder of `save_checkpoint`, which all ranks write. It holds Lightning's own values as
`extra`. Weights alone are a file with whole tensors, as DDP's: Lightning writes and reads it.
"""

import io
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.integrations.config_values import (
    CLIPPING,
    STEPS,
    ConfigOrPolicy,
    Precision,
    fill_config,
    refuse_other_precision,
)
from zeroamp.integrations.loop_driver import LoopDriver, refuse_shared_samples
from zeroamp.policies.auto_wrap import AutoWrapPolicy
from zeroamp.policies.errors import CheckpointError, ConfigError, StepError, WrapError
from zeroamp.policies.policy import Policy, policy_from_config
from zeroamp.training.step import TrainStep, step_of
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import reshard, wrap_state
from zeroamp.wrapping.wrap import wrap_model

_MIXED: Mapping[str, Precision | None] = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""Lightning's name of a precision -> accelerate's; None: the config decides."""
_STARTING = {
    "accelerator", "parallel_devices", "cluster_environment", "process_group_backend", "timeout", "start_method",
}  # fmt: skip
"""Arguments of Lightning's `DDPStrategy` for starting processes."""
_EXTRA = "lightning"
_HOW_TO_ACCUMULATE = (
    "every backward of an optimizer step but the last inside `with self.trainer.strategy.block_backward_sync():`."
)


class _ForwardModule(nn.Module):
    """Calls the wrapped model. Lightning needs a module other than the model for redirecting methods."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, with its hooks."""
        return self.module(*args, **kwargs)


class ZeroampStrategy(DDPStrategy):
    """Strategy of `Trainer` that shards a `LightningModule` with `wrap_model` and trains it with `TrainStep`."""

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
            example_inputs: see `zeroamp.wrap_model`. The wrapped model is the LightningModule.
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
        self.wrap_arguments: dict[str, Any] = {"auto_wrap_policy": auto_wrap_policy, "example_inputs": example_inputs}
        self._mixed = "32-true"
        self._driver: LoopDriver | None = None
        self._policy: Policy | None = None
        super().__init__(**starting)
        self._forward_redirection = _ForwardRedirection()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "zeroamp" (stage 3) and "zeroamp_stage_0" to "zeroamp_stage_3"."""
        strategy_registry.register("zeroamp", cls, description="zeroamp at ZeRO stage 3", override=True)
        for stage in range(4):
            text = f"zeroamp at ZeRO stage {stage}"
            strategy_registry.register(f"zeroamp_stage_{stage}", cls, description=text, override=True, stage=stage)

    # Set by the Trainer

    @property
    def precision_plugin(self) -> PrecisionPlugin:
        """The plugin that the Trainer calls."""
        return _ZeroampPrecision(self)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: PrecisionPlugin | None) -> None:
        if precision_plugin is None:
            return
        self._mixed = str(getattr(precision_plugin, "precision", "32-true"))
        if self._mixed not in _MIXED:
            raise ConfigError(
                "The precision of a zeroamp strategy must be 32-true (the config decides), bf16-mixed or 16-mixed, but "
                f"is {self._mixed} ({type(precision_plugin).__name__}). Parameters are stored as fp32 shards (master "
                'weights). Leave precision out, and write "bf16": {"enabled": true} in the config: parameters are '
                "then all-gathered and used in low precision."
            )
        _ = self._policy_for(None)  # raises in the Trainer's constructor

    # For users to read

    @property
    def policy(self) -> Policy:
        """The policy from the config and the Trainer's arguments. It exists after the set-up."""
        if self._policy is None:
            raise ConfigError("ZeroampStrategy.policy was read before the Trainer's set-up. Read it in on_fit_start.")
        return self._policy

    @property
    def train_step(self) -> TrainStep:
        """The `TrainStep`. It exists from `on_fit_start` on."""
        if self._driver is None or not self._driver.optimizers:
            raise StepError("ZeroampStrategy.train_step was read without a fit. Read it in or after on_fit_start.")
        return self._driver.train

    @property
    def report(self) -> StepReport | None:
        """The report of the last optimizer step: loss, gradient norm, loss scale, whether it was skipped."""
        return None if self._driver is None else self._driver.report

    # Set-up

    def setup(self, trainer: "pl.Trainer") -> None:
        """Wrap the LightningModule, and build its optimizers and the `TrainStep`."""
        if self.accelerator is None or self.lightning_module is None:
            raise AssertionError("expected a strategy that is connected to a Trainer and a model")
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if self._layer_sync is not None:
            raise ConfigError(
                "sync_batchnorm=True is not supported: zeroamp wraps the modules without replacing any. Leave it out, "
                "and call torch.nn.SyncBatchNorm.convert_sync_batchnorm in configure_model."
            )
        _refuse_unsupported(module, trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._policy = self._policy_for(trainer)
        if not isinstance(module, FSDPModule):
            wrap_model(module, self._policy, **self.wrap_arguments)
        refuse_shared_samples(module, "Lightning's Trainer", self.num_nodes * self.num_processes)
        if is_fitting and wrap_state(module).plan.policy != self._policy:  # others evaluate it as it was wrapped
            raise WrapError(
                f"{type(module).__name__} was wrapped with another config before. Build a new module, or use the "
                "same config and Trainer arguments."
            )
        self.model = _ForwardModule(module)
        self.barrier()
        if is_fitting or self._driver is None or self._driver.root is not module:
            self._driver = LoopDriver(module, _HOW_TO_ACCUMULATE)
        if is_fitting:
            self.setup_optimizers(trainer)

    def _policy_for(self, trainer: "pl.Trainer | None") -> Policy:
        """Return the policy from the config, the precision, and the arguments of the Trainer if there is one.

        Raises:
            ConfigError: the config is invalid, or contradicts the arguments.
        """
        known: dict[str, tuple[str, Any]] = {}
        if trainer is not None:
            known[STEPS] = "accumulate_grad_batches", trainer.accumulate_grad_batches
            is_norm = trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
            if is_norm and trainer.gradient_clip_val is not None:
                known[CLIPPING] = "gradient_clip_val", float(trainer.gradient_clip_val)
        precision = _MIXED[self._mixed]
        config = fill_config(self._config, known, precision=precision, arguments="the arguments of the Trainer")
        policy = policy_from_config(config, world_size=None if trainer is None else self.num_nodes * self.num_processes)
        refuse_other_precision(policy, precision, f'precision="{self._mixed}"')
        if policy.reproducible:
            # The first forward would draw random numbers before there is a TrainStep that seeds them.
            raise ConfigError(
                "zeroamp.reproducible must not be true with Lightning's Trainer: it counts micro-batches and divides "
                "losses itself. Remove the key, or train with zeroamp.TrainStep, accelerate or transformers' Trainer."
            )
        return policy

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Build the optimizers of `configure_optimizers`."""
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        driver = self._fitting()
        driver.add(self.optimizers)
        self.optimizers = [_view_of(optimizer, driver) for optimizer in self.optimizers]
        _ = driver.train  # raises here if an optimizer holds other parameters

    def _fitting(self) -> LoopDriver:
        if self._driver is None:
            raise AssertionError("expected a strategy that was set up")
        return self._driver

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build modules on the meta device if `empty_init`, else on the CPU: `wrap_model` moves the shards."""
        with torch.device("meta") if empty_init else nullcontext():
            yield

    def model_to_device(self) -> None:
        """Do nothing: `wrap_model` moves shards."""

    # Steps

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Make backwards inside the context accumulate: none of them is the last of its optimizer step."""
        with self._fitting().accumulating():
            yield

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None
    ) -> Any:
        """Run the closure, Lightning's hooks, clipping, and the update."""
        module: Any = model or self.lightning_module
        result = closure()
        driver = self._fitting()
        driver.norm()  # averages and unscales the gradients before hooks read them
        self.precision_plugin._after_closure(module, optimizer)
        driver.step(driver.optimizers[0])
        return result

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is loaded into the shards, which exist after the set-up."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` loads optimizers together with the model."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict with sharded parameters."""
        root = self._fitting().root
        reshard(root.modules())
        state: dict[str, Any] = root.state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder from all ranks, or a file: see `docs/lightning.md`. All ranks call it.

        Raises:
            CheckpointError: called inside an optimizer step, or a rank cannot write.
        """
        driver = self._fitting()
        if not driver.optimizers or not checkpoint.get("optimizer_states"):
            whole = {name: self._whole(value) for name, value in checkpoint["state_dict"].items()}
            super().save_checkpoint({**checkpoint, "state_dict": whole}, filepath, storage_options)
            return
        if not step_of(driver.train).is_between_steps:
            raise CheckpointError(
                f"{filepath} cannot be saved inside an optimizer step: the gradients of its micro-batches would be "
                "lost. Set val_check_interval to a multiple of accumulate_grad_batches. For a ModelCheckpoint with "
                "every_n_train_steps, set save_top_k=-1, or monitor a metric of the validation."
            )
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        _save_sharded(self.broadcast(filepath), driver.root, driver.train, rest)

    def _whole(self, value: Any) -> Any:
        """Return a whole tensor on the CPU of the first rank, and an empty one on other ranks."""
        if not isinstance(value, DTensor):
            return value
        whole: torch.Tensor = cast(DTensor, value.detach().to(self.root_device)).full_tensor()  # from offloaded shards
        return whole.cpu() if self.is_global_zero else torch.empty(0)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and, in a fit, optimizers. Return the values that Lightning restores itself."""
        path, driver = Path(self.broadcast(checkpoint_path)), self._fitting()
        if path.is_dir():
            rest = _load_sharded(path, driver.root, driver.train if driver.optimizers else None, weights_only)
            self._note_saved(rest)
            return {**rest, "state_dict": {}, "optimizer_states": []}
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._note_saved(found)
        module = self.lightning_module
        reshard(driver.root.modules())
        options = StateDictOptions(full_state_dict=True, strict=module is None or module.strict_loading)
        set_model_state_dict(driver.root, found["state_dict"], options=options)
        for optimizer, state in zip(driver.optimizers, found.get("optimizer_states", []), strict=False):
            optimizer.load_state_dict(state)  # sharded by a hook of `TrainStep`
        return found

    def _note_saved(self, found: Mapping[str, Any]) -> None:
        """Make each `ModelCheckpoint` count the loaded step as saved.

        After a load, it would save this step again in the next micro-batch, which is inside an optimizer step.
        """
        if self.lightning_module is not None and "global_step" in found:
            for callback in self.lightning_module.trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    callback._last_global_step_saved = found["global_step"]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` loaded the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` loaded the optimizers."""

    def teardown(self) -> None:
        """Tear down the accelerator. The model stays wrapped, on its device: the Trainer may test it next."""
        if self.cluster_environment is None or self.accelerator is None:
            raise AssertionError("expected a strategy that is connected to a Trainer")
        self.cluster_environment.teardown()
        self.accelerator.teardown()


def _refuse_unsupported(module: "pl.LightningModule", trainer: "pl.Trainer") -> None:
    name = type(module).__name__
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # a connector sets it
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ConfigError(
                f"The callback {type(callback).__name__} averages a copy of {name} that was made before sharding. "
                "Remove it, and average the shards, module.parameters(), in a callback of your own."
            )
    if not module.automatic_optimization:
        raise ConfigError(
            f"{name} sets automatic_optimization = False, which zeroamp's strategy does not have. Train it in a loop "
            "of your own after zeroamp.wrap_model, with Fabric's launch() and data loaders: docs/lightning.md."
        )
    if is_overridden("backward", module):
        raise ConfigError(
            f"{name} overrides LightningModule.backward, but TrainStep runs the backward. Remove the method. Scale the "
            "loss in training_step, and use on_before_backward and on_after_backward."
        )
    if module._compiler_ctx is not None:
        raise ConfigError(
            f"{name} was passed to torch.compile, but must be compiled after it is sharded. Compile its blocks in "
            "configure_model: self.layers[i].compile()."
        )


class _ZeroampPrecision(PrecisionPlugin):
    """Enters the config's autocast around steps, and runs the backward and clipping by the `TrainStep`."""

    def __init__(self, strategy: ZeroampStrategy) -> None:
        self.strategy = strategy
        self.precision = cast(Any, strategy._mixed)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the config's autocast. It does not cache casts, since parameters may be updated inside it."""
        policy = self.strategy.policy
        if policy.mode != "autocast":
            return nullcontext()
        return torch.autocast(self.strategy.root_device.type, dtype=policy.param_dtype, cache_enabled=False)

    def backward(self, tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        """Run `LoopDriver.backward`. The loop has divided the loss by the number of micro-batches."""
        self.strategy._fitting().backward(tensor)
        torch.clear_autocast_cache()  # the graphs of casts in the loop's own autocast are released

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the gradients by norm or value, once per optimizer step. 0: they are not clipped."""
        del optimizer
        if clip_val <= 0:
            return
        driver = self.strategy._fitting()
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            driver.clip_value(float(clip_val))
        else:
            driver.clip_norm(float(clip_val))


def _view_of(optimizer: Optimizer, driver: LoopDriver) -> Optimizer:
    """Return a view of `optimizer` whose `zero_grad` calls the driver: see [Note: Views of optimizers]."""

    def zero_grad(_view: Any, set_to_none: bool = True) -> None:
        del set_to_none  # gradients are always released
        driver.zero_grad(optimizer)

    def load_state_dict(_view: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)  # a hook of `TrainStep` shards it

    cls, methods = type(optimizer), {"zero_grad": zero_grad, "load_state_dict": load_state_dict}
    view: Optimizer = object.__new__(type(cls.__name__, (cls,), methods))
    view.__dict__ = vars(optimizer)
    return view


def _save_sharded(path: Any, root: nn.Module, train: TrainStep, rest: Mapping[str, Any]) -> None:
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


def _load_sharded(path: Path, root: nn.Module, train: TrainStep | None, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint folder, and return the saved `rest`. `train` None: only the model is loaded."""
    extra = load_checkpoint(path, root, train, load_lr_scheduler_states=False, extra_rank=0)
    packed = extra.get(_EXTRA) if isinstance(extra, dict) else None
    if not isinstance(packed, torch.Tensor):
        raise CheckpointError(
            f"{path} was not saved by this strategy. Load it with zeroamp.load_checkpoint(folder, model, train)."
        )
    file = io.BytesIO(packed.numpy().tobytes())
    rest: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    return rest


ZeroampStrategy.register_strategies(StrategyRegistry)
