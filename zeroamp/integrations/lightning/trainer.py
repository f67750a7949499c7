"""`ZeroampStrategy` for `lightning.pytorch.Trainer`. Tested with lightning 2.6.6.

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
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zeroamp.integrations.config_values import CLIPPING, STEPS
from zeroamp.integrations.lightning.strategy import (
    ConfigPrecision,
    ForwardModule,
    SharedStrategy,
    load_sharded,
    load_whole,
    raw_optimizer,
    run_backward,
    save_sharded,
    view_of,
)
from zeroamp.integrations.loop_driver import LoopDriver, refuse_shared_samples
from zeroamp.policies.errors import CheckpointError, ConfigError, StepError, WrapError
from zeroamp.policies.policy import Policy
from zeroamp.training.step import TrainStep, driver_of
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import reshard, wrap_state
from zeroamp.wrapping.wrap import wrap_model

_HOW_TO_ACCUMULATE = "Trainer(accumulate_grad_batches=...)."


class ZeroampStrategy(SharedStrategy, DDPStrategy):
    """Strategy of `Trainer` that shards a `LightningModule` with `wrap_model` and trains it with `TrainStep`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `SharedStrategy`."""
        self._driver: LoopDriver | None = None
        self._policy: Policy | None = None
        super().__init__(*args, **kwargs)
        self._forward_redirection = _ForwardRedirection()

    # Set by the Trainer

    @property
    def precision_plugin(self) -> Precision:
        """The plugin that the Trainer calls."""
        return _ZeroampPrecision(self)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            self.take_precision(precision_plugin)
            self.policy_of({}, "the Trainer", world_size=None)  # raises in the Trainer's constructor

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
        self.model = ForwardModule(module)
        self.barrier()
        if is_fitting or self._driver is None or self._driver.root is not module:
            self._driver = LoopDriver(module, _HOW_TO_ACCUMULATE)
        if is_fitting:
            self.setup_optimizers(trainer)

    def _policy_for(self, trainer: "pl.Trainer") -> Policy:
        known: dict[str, tuple[str, Any]] = {STEPS: ("accumulate_grad_batches", trainer.accumulate_grad_batches)}
        is_norm = trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
        if is_norm and trainer.gradient_clip_val is not None:
            known[CLIPPING] = "gradient_clip_val", float(trainer.gradient_clip_val)
        return self.policy_of(known, "the arguments of the Trainer", world_size=self.num_nodes * self.num_processes)

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Build the optimizers of `configure_optimizers`."""
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        driver = self._fitting()
        driver.add(self.optimizers)
        self.optimizers = [view_of(optimizer, driver) for optimizer in self.optimizers]
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
        driver.step(raw_optimizer(optimizer))
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
        if not driver_of(driver.train).is_between_steps:
            raise CheckpointError(
                f"{filepath} cannot be saved inside an optimizer step: the gradients of its micro-batches would be "
                "lost. Set val_check_interval to a multiple of accumulate_grad_batches. For a ModelCheckpoint with "
                "every_n_train_steps, set save_top_k=-1, or monitor a metric of the validation."
            )
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        save_sharded(self.broadcast(filepath), driver.root, driver.train, rest)

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
            rest = load_sharded(path, driver.root, driver.train if driver.optimizers else None, weights_only)
            self._note_saved(rest)
            return {**rest, "state_dict": {}, "optimizer_states": []}
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._note_saved(found)
        module = self.lightning_module
        load_whole(driver.root, found["state_dict"], strict=module is None or module.strict_loading)
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
            f"{name} sets automatic_optimization=False. Its training_step would run backwards and updates inside of "
            "the wrapped model's forward. Write the loop with Fabric and FabricZeroampStrategy, or with TrainStep."
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


class _ZeroampPrecision(ConfigPrecision):
    """Runs the backward and clipping by the `TrainStep`."""

    def backward(self, tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        """Run `TrainStep.backward` instead of `LightningModule.backward`."""
        run_backward(self.strategy._fitting(), tensor)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the gradients by norm or value, once per optimizer step. 0: they are not clipped."""
        if clip_val <= 0:
            return
        driver = self.strategy._fitting()
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            driver.clip_value(float(clip_val), raw_optimizer(optimizer))
        else:
            driver.clip_norm(float(clip_val), raw_optimizer(optimizer))
