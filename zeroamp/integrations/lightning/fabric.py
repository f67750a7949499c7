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
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _Stateful
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer

from zeroamp.integrations.lightning.checkpoint import (
    is_sharded,
    load_full_model,
    load_sharded,
    local_path,
    model_state,
    read_full,
    save_sharded,
    whole_tensors,
    write_full,
)
from zeroamp.integrations.lightning.strategy import (
    ForwardModule,
    SharedStrategy,
    clip_norm,
    driver_for,
    mixed_precision_of,
    raw_optimizer,
    refuse_arguments,
    refuse_storage_options,
    root_of,
    run_backward,
    view_of,
)
from zeroamp.integrations.loop_driver import LoopDriver
from zeroamp.optimizers.parameters_before import ParametersBefore
from zeroamp.policies.errors import CheckpointError, ConfigError, StepError
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
        policy = self.policy_of(world_size=self.num_nodes * self.num_processes if self.parallel_devices else None)
        if policy.gradient_accumulation_steps > 1:
            raise ConfigError(
                f"gradient_accumulation_steps must be 1 or left out with Fabric, but is "
                f"{policy.gradient_accumulation_steps}: a loop of Fabric counts its micro-batches and divides their "
                f"losses. Remove the key, and run {_HOW_TO_ACCUMULATE}"
            )
        return policy

    @property
    def precision(self) -> Precision:
        """The plugin that Fabric calls around forwards."""
        return _ZeroampPrecision(self)

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._mixed = mixed_precision_of(precision)
        self.__dict__.pop("policy", None)
        if precision is not None:
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
        wrap_model(module, self.policy, **self._wrap_arguments)
        self._drivers.append(driver_for(module, _HOW_TO_ACCUMULATE))
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

    def _driver(self, module: nn.Module | None) -> LoopDriver:
        if module is None and len(self._drivers) == 1:
            return self._drivers[0]
        if module is None:
            raise StepError(
                f"fabric.backward was called without a model, and {len(self._drivers)} were set up. Pass the model "
                "whose optimizer steps next: fabric.backward(loss, model=model)."
            )
        for driver in self._drivers:
            if driver.root is root_of(module):
                return driver
        raise StepError(f"A {type(module).__name__} was not set up by this Fabric. Call fabric.setup first.")

    def _driver_of(self, optimizer: Any) -> LoopDriver:
        raw = raw_optimizer(optimizer)
        for driver in self._drivers:
            if any(raw is own for own in driver.optimizers):
                return driver
        raise StepError(f"A {type(raw).__name__} was not set up by this Fabric. Call fabric.setup first.")

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run `TrainStep.backward`."""
        refuse_arguments("fabric.backward", [*kwargs, *("more arguments" for _ in args)])
        run_backward(self._driver(module), tensor)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the closure if there is one, then `TrainStep.update`. Return the closure's result."""
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)
        refuse_arguments("optimizer.step", kwargs)
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        self._driver_of(optimizer).step(raw_optimizer(optimizer))
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
        norm = clip_norm(self._driver(module), float(max_norm), raw_optimizer(optimizer))
        skips = self.policy.low_dtype == torch.float16 or self.policy.skip_nonfinite_steps
        if error_if_nonfinite and not skips and not bool(norm.isfinite()):
            raise StepError(
                f"The gradient norm is {float(norm)}. To skip such steps, pass error_if_nonfinite=False and set "
                '"zeroamp": {"skip_nonfinite_steps": true} in the config.'
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clamp each element of the gradients to [-clip_val, clip_val]."""
        self._driver(module).clip_value(float(clip_val), raw_optimizer(optimizer))

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state dict with sharded parameters."""
        return model_state(root_of(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole tensors, which every rank holds, into the shards."""
        load_full_model(root_of(module), state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict with sharded tensors."""
        return raw_optimizer(optimizer).state_dict()

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a sharded checkpoint if `state` has the optimizers of a model, else a file. All ranks call it.

        Raises:
            CheckpointError: `state` has several models or only some of the optimizers, or storage options or, for a
                sharded checkpoint, a filter are given.
        """
        refuse_storage_options(storage_options)
        target = local_path(self.broadcast(path))
        driver, rest = self._split(state)
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        if driver is None:
            super().save_checkpoint(target, state, filter=filter)
            return
        if optimizers:
            if filter:
                raise CheckpointError(
                    "A filter is for a file, but this checkpoint is sharded. Leave the optimizers out of the state."
                )
            if len(optimizers) != len(driver.optimizers):
                raise CheckpointError(
                    f"The state has {len(optimizers)} of the {len(driver.optimizers)} optimizers of the model. Add all "
                    "of them, or none, to save the weights as a file."
                )
            names = {key: None for key, value in state.items() if isinstance(value, nn.Module | Optimizer)}
            save_sharded(target, driver.root, driver.train, {**rest, **names})  # a strict load expects the names
            return
        whole = whole_tensors(self._convert_stateful_objects_in_state(state, filter or {}), driver.root)
        write_full(target, whole, driver.root)

    def _split(self, state: Mapping[str, Any]) -> tuple[LoopDriver | None, dict[str, Any]]:
        """Return the driver of the wrapped model in a state, and the values that are not models or optimizers."""
        modules = [value for value in state.values() if isinstance(value, nn.Module)]
        wrapped = [module for module in modules if any(root_of(module) is driver.root for driver in self._drivers)]
        if len(wrapped) > 1 or (wrapped and len(modules) > 1):
            raise CheckpointError(
                f"A checkpoint holds one model, but the state has {len(modules)}. Save each in a folder of its own."
            )
        rest = {
            key: value.state_dict() if isinstance(value, _Stateful) else value
            for key, value in state.items()
            if not isinstance(value, nn.Module | Optimizer)
        }
        return (self._driver(wrapped[0]) if wrapped else None), rest

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` wrote, or a file with whole tensors, into the objects of `state`.

        Raises:
            CheckpointError: there is no checkpoint at `path`, or it does not fit.
            KeyError: `strict`, and the checkpoint lacks a key of `state`.
        """
        source = local_path(self.broadcast(path))
        if isinstance(state, nn.Module):  # Fabric.load_raw
            root = self._driver(state).root
            load_full_model(root, read_full(source, root, weights_only), strict=strict)
            return {}
        if isinstance(state, Optimizer):
            own = self._driver_of(state)
            _ = own.train  # makes the optimizer shard what it loads
            raw_optimizer(state).load_state_dict(read_full(source, own.root, weights_only))
            return {}
        state = {} if state is None else state
        driver, _ = self._split(state)
        sharded = is_sharded(source)
        if driver is None:
            if sharded:
                raise CheckpointError(f"{source} is sharded, and the state has no model. Load it with its model.")
            return super().load_checkpoint(source, state, strict, weights_only)
        train = driver.train if any(isinstance(value, Optimizer) for value in state.values()) else None
        if sharded:
            found = load_sharded(source, driver.root, train, weights_only)
        else:
            found = read_full(source, driver.root, weights_only)
        _validate_keys_for_strict_loading(state.keys(), found.keys(), strict=strict)
        for name in [name for name in state if name in found]:
            value, saved = state[name], found.pop(name)
            if isinstance(value, nn.Module | Optimizer) and sharded:
                continue  # loaded already
            if isinstance(value, nn.Module):
                load_full_model(driver.root, saved, strict=strict)
            elif isinstance(value, _Stateful):  # an optimizer shards what it loads
                (raw_optimizer(value) if isinstance(value, Optimizer) else value).load_state_dict(saved)
            else:
                state[name] = saved
        return found


class _SyncControl(_BackwardSyncControl):
    def __init__(self, strategy: ZeroampStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Make backwards of the model inside the context accumulate."""
        return self._strategy._driver(module).accumulating(enabled)


class _ZeroampPrecision(Precision):
    """Enters the config's autocast. With "bf16-mixed" and "16-mixed", casts inputs and outputs as Fabric's own does."""

    def __init__(self, strategy: ZeroampStrategy) -> None:
        self._strategy = strategy
        if strategy._mixed is not None:
            self.precision = strategy._mixed

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the config's autocast, for `Fabric.autocast` and around forwards."""
        return self._strategy.autocast(self._strategy.policy)

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs as Fabric does for its mixed precision."""
        return data if self._strategy._mixed is None else _cast(data, self._strategy.policy.param_dtype)

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point outputs as Fabric does for its mixed precision."""
        return data if self._strategy._mixed is None else _cast(data, torch.get_default_dtype())


def _cast(data: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(data, dtype=torch.Tensor, function=cast)
