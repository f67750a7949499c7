"""`ZeroampStrategy` for `lightning.fabric.Fabric`. Tested with lightning 2.6.6.

| call of Fabric | what happens |
|---|---|
| `setup`, `setup_module` | `wrap_model`; parameters of optimizers that were built before are replaced by the shards |
| `init_module(empty_init=True)` | builds on the meta device; `wrap_model` initialises the shards |
| `backward`, `no_backward_sync` | `TrainStep.backward(loss, is_last=..., divide=False)` |
| `clip_gradients`, `optimizer.step()` | the norm of `TrainStep`, then `TrainStep.update` |
| `save`, `load` | a sharded checkpoint, or a file if the state has no optimizer; see `docs/lightning.md` |
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _Stateful
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from zeroamp.integrations.config_values import STEPS
from zeroamp.integrations.lightning.strategy import (
    ConfigPrecision,
    ForwardModule,
    SharedStrategy,
    load_sharded,
    load_whole,
    raw_optimizer,
    root_of,
    run_backward,
    save_sharded,
    view_of,
)
from zeroamp.integrations.loop_driver import LoopDriver
from zeroamp.optimizers.parameters_before import ParametersBefore
from zeroamp.policies.errors import CheckpointError, StepError
from zeroamp.policies.policy import Policy
from zeroamp.training.step import TrainStep
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.wrap import wrap_model

_HOW_TO_ACCUMULATE = (
    "every backward of an optimizer step but the last inside fabric.no_backward_sync(model), and optimizer.step() "
    "after the last."
)


class ZeroampStrategy(SharedStrategy, DDPStrategy):
    """Strategy of `Fabric` that shards models with `wrap_model` and trains them with `TrainStep`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `SharedStrategy`."""
        self._drivers: list[LoopDriver] = []
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _SyncControl(self)

    @cached_property
    def policy(self) -> Policy:
        """The policy from the config and from Fabric's `precision`.

        Raises:
            ConfigError: the config is invalid, or contradicts Fabric's arguments.
        """
        # The loop counts its micro-batches and divides their losses.
        known = {STEPS: ("the number for Fabric, whose loop runs no_backward_sync,", 1)}
        world_size = self.num_nodes * self.num_processes if self.parallel_devices else None
        return self.policy_of(known, "Fabric", world_size=world_size)

    @property
    def precision(self) -> Precision:
        """The plugin that Fabric calls around forwards."""
        return _ZeroampPrecision(self)

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None:
            self.take_precision(precision)
            self.__dict__.pop("policy", None)
            _ = self.policy  # raises its errors in the constructor of Fabric

    @property
    def train_steps(self) -> list[TrainStep]:
        """The `TrainStep` of each model that was set up with an optimizer, in the order of the set-up."""
        return [driver.train for driver in self._drivers if driver.optimizers]

    @property
    def report(self) -> StepReport | None:
        """The report of the last optimizer step. With several models, see `TrainStep.callbacks`."""
        reports = [driver.report for driver in self._drivers if driver.report is not None]
        return reports[-1] if reports else None

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Build modules on the meta device if `empty_init`, else on the CPU. `wrap_model` moves the shards."""
        return torch.device("meta") if empty_init else nullcontext()

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `wrap_model` moves shards, so that no device holds the whole model."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Wrap a model in place."""
        wrap_model(module, self.policy, **self.wrap_arguments)
        self._drivers.append(LoopDriver(module, _HOW_TO_ACCUMULATE))
        return ForwardModule(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Wrap a model in place, and replace the parameters of its optimizers by the shards."""
        before = ParametersBefore(module)
        forward = self.setup_module(module)
        before.wrapped(module)
        before.repoint(optimizers)
        return forward, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer of a model that was set up before."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for driver in self._drivers:
            if any(id(parameter) in held for parameter in driver.root.parameters()):
                driver.add([optimizer])
                return view_of(optimizer, driver)
        raise StepError(
            f"{type(optimizer).__name__} holds no parameter of a model that was set up. Call fabric.setup(model, "
            "optimizer), or build the optimizer after model = fabric.setup_module(model)."
        )

    def driver(self, module: nn.Module | None) -> LoopDriver:
        """Return the driver of a model that was set up. None: the only one.

        Raises:
            StepError: there is no such model, or there are several.
        """
        found = [driver for driver in self._drivers if module is None or driver.root is root_of(module)]
        if len(found) != 1:
            raise StepError(
                f"{len(found)} of the {len(self._drivers)} models that fabric.setup was called with are meant. Set the "
                "model up first. With several models, name the one whose optimizer steps next: "
                "fabric.backward(loss, model=model)."
            )
        return found[0]

    def backward(self, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Run `TrainStep.backward`."""
        run_backward(self.driver(module), tensor)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run the closure if there is one, then `TrainStep.update`. Return the closure's result."""
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        raw = raw_optimizer(optimizer)
        next(driver for driver in self._drivers if any(raw is own for own in driver.optimizers)).step(raw)
        return output

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the 2-norm over all parameters and ranks, and return the norm before clipping, 0-D fp32."""
        if float(norm_type) != 2.0:
            raise StepError(f"norm_type must be 2, but is {norm_type}: TrainStep computes the 2-norm. Leave it out.")
        norm = self.driver(module).clip_norm(float(max_norm), raw_optimizer(optimizer))
        skips = self.policy.low_dtype == torch.float16 or self.policy.skip_nonfinite_steps
        if error_if_nonfinite and not skips and not bool(norm.isfinite()):
            raise StepError(
                f"The gradient norm is {float(norm)}. To skip such steps, pass error_if_nonfinite=False and set "
                '"zeroamp": {"skip_nonfinite_steps": true} in the config.'
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clamp each element of the gradients to [-clip_val, clip_val]."""
        self.driver(module).clip_value(float(clip_val), raw_optimizer(optimizer))

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole tensors in CPU memory on the first rank, and {} on other ranks. All ranks call it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(root_of(module), options=options)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole tensors, which every rank holds, into the shards."""
        load_whole(root_of(module), state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a sharded checkpoint if `state` has the optimizers of a model, else a file. All ranks call it.

        Raises:
            CheckpointError: a sharded checkpoint would have several models, only some of the model's optimizers, or a
                filter.
        """
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        driver = self._driver_in(state)
        if driver is None or not optimizers:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter or len(optimizers) != len(driver.optimizers):
            raise CheckpointError(
                f"A sharded checkpoint has all {len(driver.optimizers)} optimizers of its model and no filter, but "
                f"fabric.save got {len(optimizers)}. Pass all of them, or none, to save the weights as a file."
            )
        rest = {key: value.state_dict() if _is_other(value) else value for key, value in state.items()}
        names = {key: None for key, value in state.items() if isinstance(value, nn.Module | Optimizer)}
        save_sharded(self.broadcast(path), driver.root, driver.train, {**rest, **names})  # a strict load needs names

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` wrote, or a file with whole tensors, into the objects of `state`.

        Raises:
            CheckpointError: the checkpoint does not fit.
            KeyError: `strict`, and the checkpoint lacks a key of `state`.
        """
        source, objects = Path(self.broadcast(path)), state if isinstance(state, Mapping) else {"": state}
        driver = self._driver_in(objects)
        has_optimizer = any(isinstance(value, Optimizer) for value in objects.values())
        # A `TrainStep` makes its optimizers shard what they load.
        train = driver.train if driver is not None and has_optimizer else None
        if driver is None or not source.is_dir():
            loaded: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return loaded
        found = load_sharded(source, driver.root, train, weights_only)
        _validate_keys_for_strict_loading(objects.keys(), found.keys(), strict=strict)
        for name in [name for name in objects if name in found]:
            value, saved = objects[name], found.pop(name)
            if _is_other(value):
                value.load_state_dict(saved)
            elif not isinstance(value, nn.Module | Optimizer):
                state[name] = saved
        return found

    def _driver_in(self, state: Mapping[str, Any]) -> LoopDriver | None:
        """Return the driver of the one model of a state that was set up; None if there is none."""
        modules = [value for value in state.values() if isinstance(value, nn.Module)]
        found = [driver for driver in self._drivers if any(root_of(module) is driver.root for module in modules)]
        if found and len(modules) > 1:
            raise CheckpointError(
                f"A checkpoint holds one model, but the state has {len(modules)}. Save each in a folder of its own."
            )
        return found[0] if found else None


def _is_other(value: Any) -> bool:
    """Return whether a value has a state, but is neither a model nor an optimizer."""
    return isinstance(value, _Stateful) and not isinstance(value, nn.Module | Optimizer)


class _SyncControl(_BackwardSyncControl):
    def __init__(self, strategy: ZeroampStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Make backwards of the model inside the context accumulate."""
        return self._strategy.driver(module).accumulating(enabled)


class _ZeroampPrecision(ConfigPrecision):
    """With "bf16-mixed" and "16-mixed", casts inputs and outputs as Fabric's own plugin does."""

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs as Fabric does for its mixed precision."""
        return self._cast(data, self.strategy.policy.param_dtype)

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point outputs as Fabric does for its mixed precision."""
        return self._cast(data, torch.get_default_dtype())

    def _cast(self, data: Any, dtype: torch.dtype) -> Any:
        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return data if self.precision == "32-true" else apply_to_collection(data, dtype=torch.Tensor, function=cast)
