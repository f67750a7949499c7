"""`ZeroampAccelerator`: lets scripts for `accelerate.Accelerator` train with zeroamp. Tested with accelerate 1.15.

accelerate has no registry of strategies, so this is a subclass. accelerate handles data loaders, schedulers, trackers,
gathering and launching. zeroamp handles the model, the optimizer step, clipping, the loss scale and checkpoints.
`distributed_type` is NO, MULTI_CPU or MULTI_GPU, and accelerate's own mixed precision is off.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs, DynamoBackend, convert_file_size_to_int, convert_to_fp32
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.integrations.accelerate.arguments import (
    asked_precision,
    bound_arguments,
    config_or_environment,
    refuse_arguments,
    refuse_dummies,
    refuse_other_optimizers,
    refuse_other_scheduler,
)
from zeroamp.integrations.config_values import (
    PRECISIONS,
    STEPS,
    ConfigOrPolicy,
    KnownValues,
    fill_config,
    flat_config,
    refuse_other_precision,
)
from zeroamp.integrations.loop_driver import LoopDriver, refuse_shared_samples
from zeroamp.optimizers.parameters_before import ParametersBefore
from zeroamp.optimizers.schedulers import CurveLR
from zeroamp.policies.auto_values import without_open_keys
from zeroamp.policies.errors import ConfigError, StepError
from zeroamp.policies.policy import Policy, policy_from_config
from zeroamp.training.step import TrainStep, step_of
from zeroamp.training.step_report import StepReport
from zeroamp.weights.export import export_hf
from zeroamp.wrapping.state import is_wrapped, wrap_state
from zeroamp.wrapping.wrap import register_forward_method, wrap_model

_CHECKPOINT = "zeroamp"
"""Folder of the model's and the optimizers' state, inside the folder of `save_state`."""
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Options for a whole state dict on the first rank."""
_TRAINED_HERE = (
    "a ZeroampAccelerator trains. Call accelerator.backward(loss), after accelerator.prepare(model, optimizer)"
)
_WITHOUT_OPTIMIZER = "has no prepared optimizer, which its config needs. Call accelerator.prepare(model, optimizer)"
_HOW_TO_ACCUMULATE = (
    "each backward by accelerator.backward(loss), and all but the last inside accelerator.accumulate(model) or "
    "no_sync. Clip and step after the last, under `if accelerator.sync_gradients:`. LocalSGD, which steps inside "
    "no_sync, is not supported."
)


class ZeroampOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's wrapper of an optimizer. Its `step` updates the parameters by the `TrainStep`."""

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Callable[[], LoopDriver]) -> None:
        """`loop`: returns the driver of the trained model and all its optimizers."""
        # device_placement=False: True would load the state again, which is sharded already.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._loop = loop

    def step(self) -> None:
        """Update the parameters, if this is the end of an optimizer step (`accelerator.sync_gradients`).

        Raises:
            StepError: no last backward has run, or `zeroamp.TrainStep` raises it.
        """
        if self.gradient_state.sync_gradients:
            loop = self._loop()
            loop.step(self.optimizer)
            self._is_overflow = loop.was_skipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard gradients that no update has used. An update releases its gradients itself.

        Inside of an optimizer step (not `accelerator.sync_gradients`) this does nothing, as in accelerate.

        Args:
            set_to_none: no effect: gradients are always released.
        """
        del set_to_none
        if self.gradient_state.sync_gradients:
            self._loop().zero_grad(self.optimizer)


class ZeroampAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` that wraps the model with `zeroamp.wrap_model` and trains it with a `zeroamp.TrainStep`.

    ```python
    accelerator = ZeroampAccelerator(zeroamp="config.json")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    ```

    It trains one model. Other models that `prepare` gets are wrapped too, for evaluation.
    """

    _divides_losses = True
    """Whether `backward` divides losses by the number of micro-batches. False: the caller's loop divides them."""

    def __init__(
        self,
        *args: Any,
        zeroamp: ConfigOrPolicy | None = None,
        wrap_arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take accelerate's arguments and a config.

        Args:
            args: see `accelerate.Accelerator`.
            zeroamp: path of a config, a mapping or a Policy. None: the path in the environment variable
                `ZEROAMP_CONFIG`. "auto" values are filled: `gradient_accumulation_steps` and the precision from
                accelerate's arguments, `gradient_clipping` with 0 (the norm is an argument of `clip_grad_norm_`), and
                in `prepare` sizes that depend on the model's `hidden_size`. Batch sizes are left out.
            wrap_arguments: more arguments of `zeroamp.wrap_model`: mesh, auto_wrap_policy, example_inputs.
            kwargs: see `accelerate.Accelerator`. `mixed_precision` may be left out: the config decides.

        Raises:
            ConfigError: the config is wrong or contradicts an argument, or an argument (a plugin of another way to
                shard, fp8, a compiler) cannot be honoured.
        """
        given = bound_arguments(args, kwargs)
        refuse_arguments(given)
        self._config = config_or_environment(zeroamp)
        self._precision = asked_precision(given.get("mixed_precision"))
        self._known: KnownValues = {}
        self._policy = self.policy_for(None)  # `Accelerator.__init__` reads `mixed_precision`
        self.wrap_arguments: dict[str, Any] = dict(wrap_arguments or {})
        """More arguments of `zeroamp.wrap_model`, for `wrap`."""
        self._before: list[ParametersBefore] = []
        self._loop: LoopDriver | None = None
        self._is_in_no_sync = self._is_saving = False
        self._save_arguments: dict[str, Any] = {}
        self._models: list[nn.Module]
        self._optimizers: list[ZeroampOptimizer]
        steps = flat_config(self._config).get(STEPS)
        if isinstance(steps, int) and given.get("gradient_accumulation_plugin") is None:
            given.setdefault(STEPS, steps)
        super().__init__(**{**given, "mixed_precision": "no"})
        self._known = {STEPS: ("gradient_accumulation_steps of accelerate", self.gradient_accumulation_steps)}
        self._policy = self.policy_for(None)
        if (backend := self.state.dynamo_plugin.backend) != DynamoBackend.NO:
            raise ConfigError(
                f"accelerate's dynamo_backend must be left out, but is {backend.value}: it would compile the sharded "
                "model as a whole. Call block.compile() on each block of the model before prepare() instead."
            )
        # Registered first: the user's hooks get the models without weights, as with other sharded models.
        self.register_save_state_pre_hook(self._save_checkpoint)
        self.register_load_state_pre_hook(self._load_checkpoint)

    # -- the policy ----------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The config's policy. Before a model is prepared, it lacks the keys that `prepare` fills."""
        return self._policy

    @property
    def mixed_precision(self) -> str:
        """The config's precision by accelerate's names: "no", "bf16" or "fp16". Scripts choose dtypes by it."""
        return PRECISIONS[self.policy.low_dtype]

    def policy_for(self, model: nn.Module | None) -> Policy:
        """Return the policy for a model. None: without the keys that depend on the model.

        Raises:
            ConfigError: the config is wrong, contradicts an argument, or has an "auto" that cannot be filled.
        """
        config = fill_config(
            self._config,
            self._known,
            precision=self._precision,
            arguments="accelerate's arguments",
            model=model,
            is_complete=model is not None,
        )
        policy = policy_from_config(without_open_keys(config))
        refuse_other_precision(policy, self._precision, "mixed_precision=")
        return policy

    # -- prepare -------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, dataloaders and schedulers, and return them in the same order.

        Models are wrapped in place. Optimizers may have been built before: their parameters are replaced by the sharded
        ones. The model of these parameters is trained; other models are only evaluated.

        Raises:
            ConfigError: an "auto" of the config cannot be filled.
            WrapError: a model cannot be wrapped.
            StepError: the optimizers hold parameters of several models, or `zeroamp.TrainStep` raises it.
        """
        refuse_dummies(args)
        for model in (each for each in args if isinstance(each, nn.Module)):
            self.prepare_model(model)  # all of them before the first optimizer
        prepared = super().prepare(*args, device_placement=device_placement)
        if any(isinstance(each, torch.optim.Optimizer) for each in args) and self._models:
            _ = self.train_step  # raises its errors here, not at the first backward
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Wrap a model in place, or take a wrapped one. Its forward then returns fp32 tensors.

        Args:
            model: plain, or from `zeroamp.wrap_model`.
            device_placement: no effect: shards are always on the device of the config.
            evaluation_mode: no effect: the model whose parameters the optimizers hold is trained.

        Raises:
            ConfigError: an "auto" of the config cannot be filled.
            WrapError: the model cannot be wrapped, its mesh has a tensor or context axis, or more ranks were started
                than accelerate counts.
        """
        del device_placement, evaluation_mode
        if any(model is known for known in self._models):
            return model
        if not is_wrapped(model):
            self._policy = self.policy_for(model)
            before = ParametersBefore(model)
            model = self.wrap(model)
            before.wrapped(model)
            self._before.append(before)
        wrap_state(model).step.trained_by = _TRAINED_HERE
        refuse_shared_samples(model, "accelerate", self.num_processes)
        with wrap_state(model).changes.noting([model]):
            if _outputs_to_fp32 not in model._forward_hooks.values():  # another training may have prepared the model
                model.register_forward_hook(_outputs_to_fp32)
            # Scripts for DDP call it on the model.
            model.no_sync = partial(self.no_sync, model)  # type: ignore[assignment]
        self._models.append(model)
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap `model` in place with the policy and `wrap_arguments`, and return it."""
        wrap_model(model, self.policy, **self.wrap_arguments)
        is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        has_images = any(each in getattr(model, "input_modalities", ()) for each in ("image", "video"))
        if (is_encoder_decoder or has_images or hasattr(model, "peft_config")) and hasattr(model, "generate"):
            register_forward_method(model, "generate")  # it calls an encoder or the base model alone
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> ZeroampOptimizer:
        """Return accelerate's wrapper of an optimizer, whose `step` updates the parameters by the `TrainStep`.

        Args:
            optimizer: built before or after the model was prepared.
            device_placement: no effect: the state is where the shards are.

        Raises:
            StepError: called inside an optimizer step.
        """
        del device_placement
        if isinstance(optimizer, ZeroampOptimizer):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        if self._loop is not None:  # it is built again, with one more optimizer
            self._loop.train.state_dict()  # raises inside an optimizer step
            self._loop = None
        prepared = ZeroampOptimizer(optimizer, lambda: self.loop_driver)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return accelerate's wrapper of a scheduler, which does not step after a skipped update.

        Raises:
            ConfigError: the config has a `scheduler` block, but this is another scheduler.
        """
        refuse_other_scheduler(self.policy, scheduler)
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(scheduler, CurveLR):
            prepared.split_batches = True  # it counts optimizer steps; accelerate steps others once per rank
        return prepared

    @property
    def train_step(self) -> TrainStep:
        """The `TrainStep` of the trained model and all prepared optimizers.

        Raises:
            StepError: no model or no optimizer is prepared, or the optimizers hold parameters of several models.
        """
        return self.loop_driver.train

    @property
    def loop_driver(self) -> LoopDriver:
        """What runs the steps of the trained model. Raises StepError as `train_step` does."""
        if self._loop is None:
            optimizers = [prepared.optimizer for prepared in self._optimizers]
            for before in self._before:
                before.repoint(optimizers)
            refuse_other_optimizers(self.policy, optimizers)
            trained = self._trained_model(optimizers)
            wrap_state(trained).step.trained_by = _TRAINED_HERE
            loop = LoopDriver(trained, _HOW_TO_ACCUMULATE, reopens=True)
            loop.add(optimizers)
            _ = loop.train  # raises its errors here
            self._loop = loop
        return self._loop

    @property
    def last_report(self) -> StepReport | None:
        """The report of the last optimizer step."""
        return None if self._loop is None else self._loop.report

    def _trained_model(self, optimizers: list[torch.optim.Optimizer]) -> nn.Module:
        if not self._models or not optimizers:
            missing = "optimizer" if self._models else "model"
            raise StepError(f"No {missing} is prepared. Call accelerator.prepare(model, optimizer) first.")
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        trained = [model for model in self._models if any(id(p) in held for p in model.parameters())]
        if len(trained) > 1:
            names = ", ".join(type(model).__name__ for model in trained)
            raise StepError(
                f"The optimizers hold parameters of {len(trained)} models ({names}), but a ZeroampAccelerator trains "
                "one. Make them parts of one module, or use a ZeroampAccelerator for each."
            )
        # If there is none, TrainStep raises the error.
        return trained[0] if trained else self._models[0]

    # -- the optimizer step --------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch, with the loss divided by `gradient_accumulation_steps`.

        It is the last backward of its optimizer step if `sync_gradients` is true, outside of `no_sync`. If a loop
        without `accumulate` calls this several times before `optimizer.step()`, gradients are added, and each call
        reduces.

        If no optimizer is prepared, the caller's own is stepped, as in a loop without `TrainStep`.

        Raises:
            StepError: `zeroamp.TrainStep.backward` raises it, or no optimizer is prepared where the config needs
                `TrainStep`.
        """
        steps, is_last = self.gradient_accumulation_steps, self.sync_gradients and not self._is_in_no_sync
        if self._models and not self._optimizers:
            self._plain_backward(loss, is_last=is_last)
            return
        loop = self.loop_driver
        # Reproducible gradients are divided once, after the sum over all micro-batches.
        divide = self.policy.reproducible and self._divides_losses and steps == self.policy.gradient_accumulation_steps
        if isinstance(loss, torch.Tensor) and not divide:  # TrainStep refuses other losses
            loss = loss / steps
        with loop.accumulating(not is_last):
            loop.backward(loss, divide=divide)

    def _plain_backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Run the backward of a loop whose optimizer is not prepared: see "The plain loop" in docs/from-fsdp2.md."""
        if (steps := self.gradient_accumulation_steps) > 1:
            raise StepError(
                f"accelerator.backward was called with gradient_accumulation_steps={steps}, but no optimizer is "
                "prepared. Call accelerator.prepare(model, optimizer)."
            )
        for model in self._models:
            wrap_state(model).step.trained_by = _WITHOUT_OPTIMIZER  # if its config has keys that need TrainStep
            cast(FSDPModule, model).set_requires_gradient_sync(is_last)
        loss.backward()  # type: ignore[no-untyped-call]

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Raise StepError: parameters are sharded, so every rank must run the same number of forwards."""
        del joinables, even_batches
        raise StepError(
            "accelerator.join_uneven_inputs was called, but the parameters are sharded, so every rank must run the "
            "same number of forwards. Leave it out, and keep even_batches=True, accelerate's default, or use drop_last."
        )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Make each backward inside the context accumulate: none of them is the last of its optimizer step."""
        del model
        outer, self._is_in_no_sync = self._is_in_no_sync, True
        try:
            yield
        finally:
            self._is_in_no_sync = outer

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the gradients of the trained model, and return their norm before clipping.

        Args:
            parameters: all trainable parameters of the model.
            max_norm: the largest 2-norm. 0: gradients are not clipped.
            norm_type: 2.

        Returns:
            The norm over all parameters and ranks: 0-D fp32, on the device.

        Raises:
            StepError: another norm or only some parameters are given, or it is not the end of an optimizer step.
        """
        if norm_type != 2:
            raise StepError(
                f"clip_grad_norm_ must get norm_type=2, but got {norm_type}: zeroamp has the 2-norm. Leave it out."
            )
        if self._models and not self._optimizers:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._refuse_part(parameters)
        return self.loop_driver.clip_norm(max_norm)

    def _refuse_part(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> None:
        trained = sum(p.requires_grad for p in step_of(self.train_step).gradients.parameters)
        # Counted, not compared: after a forward since the backward, a model yields its unsharded parameters.
        given = sum(p.requires_grad for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters))
        if given < trained:
            raise StepError(
                f"clip_grad_norm_ must get all {trained} trainable parameters, but got {given}: zeroamp computes one "
                "norm of all gradients. Pass model.parameters() of the prepared model."
            )

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp each element of the averaged gradients to [-clip_value, clip_value].

        Args:
            parameters: no effect: all gradients are clamped.
            clip_value: the largest absolute value.

        Raises:
            StepError: it is not the end of an optimizer step, gradients were clipped before, or the config has a
                `gradient_clipping`, which is a norm.
        """
        del parameters
        self.loop_driver.clip_value(clip_value)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Save the complete state of the training. All ranks call it, between two optimizer steps.

        `zeroamp.save_checkpoint` writes model, optimizers, loss scale and step counts into the folder `zeroamp` of the
        checkpoint. It is sharded, and any number of ranks can load it. accelerate writes schedulers, samplers, random
        states and registered objects. Models that are only evaluated are not saved.

        Args:
            output_dir: see accelerate. Automatic naming and `total_limit` work.
            safe_serialization: no effect.
            save_model_func_kwargs: `exclude_frozen_parameters` of `zeroamp.save_checkpoint`.

        Raises:
            CheckpointError: on all ranks, if a rank could not write.
            StepError: called inside an optimizer step.
        """
        self._begin_checkpoint()
        self._save_arguments = save_model_func_kwargs
        optimizers, self._optimizers, self._is_saving = self._optimizers, [], True
        try:
            return super().save_state(output_dir, safe_serialization)
        finally:
            self._optimizers, self._is_saving = optimizers, False

    def _save_checkpoint(self, _models: list[nn.Module], weights: list[Any], folder: str) -> None:
        weights.clear()
        if self._loop is not None:
            train = self._loop.train
            save_checkpoint(Path(folder) / _CHECKPOINT, train.model, train, keep=1, **self._save_arguments)

    def _begin_checkpoint(self) -> None:
        if self._models and self._optimizers:
            # Raises inside an optimizer step, before accelerate removes older states. Builds the TrainStep if model and
            # optimizers were prepared one by one.
            self.train_step.state_dict()

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None) -> None:
        """Restore what `save_state` wrote. On the same number of ranks, training continues bit for bit.

        Args:
            input_dir: see accelerate.
            load_kwargs: see accelerate.

        Raises:
            CheckpointError: on all ranks, if there is no checkpoint or it does not fit the model.
            StepError: called inside an optimizer step.
        """
        self._begin_checkpoint()
        optimizers, self._optimizers = self._optimizers, []
        try:
            super().load_state(input_dir, load_kwargs)
        finally:
            self._optimizers = optimizers

    def _load_checkpoint(self, models: list[nn.Module], folder: str) -> None:
        models.clear()
        if self._loop is not None:
            train = self._loop.train
            load_checkpoint(Path(folder) / _CHECKPOINT, train.model, train)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a prepared model as safetensors, by `zeroamp.export_hf`. All ranks call it.

        Args:
            model: a prepared model.
            save_directory: a folder that all ranks see.
            max_shard_size: most bytes of one file, or a string such as "5GB".
            safe_serialization: no effect: the files are safetensors.

        Raises:
            CheckpointError: `zeroamp.export_hf` raises it.
        """
        del safe_serialization
        export_hf(model, save_directory, max_shard_bytes=convert_file_size_to_int(max_shard_size))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict of a prepared model in CPU memory on the first rank, and {} on other ranks.

        All ranks call it. Trainable parameters are in fp32, or in the config's low dtype if the config sets
        `stage3_gather_16bit_weights_on_model_save`. `unwrap` has no effect.
        """
        del unwrap
        if self._is_saving:  # in `save_state`, whose checkpoint has the weights
            return {}
        dtype = wrap_state(model).plan.policy.export_dtype
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        state: dict[str, Any] = get_model_state_dict(model, options=_FULL)
        return {
            name: value.to(dtype) if name in parameters and value.dtype == torch.float32 else value
            for name, value in state.items()
        }

    # -- the rest ------------------------------------------------------------------------------------------------------

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Run a block under the config's autocast: for a loss or a model outside of the wrapped model.

        Args:
            autocast_handler: with `enabled=False`, the block runs in fp32.
        """
        policy, device = self.policy, self.device.type
        if policy.mode == "autocast" and (autocast_handler is None or autocast_handler.enabled):
            context = torch.autocast(device, dtype=policy.param_dtype)
        else:
            context = torch.autocast(device, enabled=False)
        with context:
            yield

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release models, optimizers and the `TrainStep`, for another training with the same accelerator."""
        self._loop, self._before = None, []
        freed: list[Any] = super().free_memory(*objects)
        return freed


def _outputs_to_fp32(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Return the outputs of a forward with low-precision tensors cast to fp32: scripts compute losses from them."""
    return convert_to_fp32(output)
