"""`DeepSpeedEngine`: the interface of DeepSpeed's engine for a wrapped model and its `TrainStep`."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.deepspeed import engine_checkpoint
from zeroamp.deepspeed.comm import get_local_rank
from zeroamp.deepspeed.data_loaders import data_loader
from zeroamp.deepspeed.engine_config import READERS, EngineConfig
from zeroamp.deepspeed.optimizer import ZeroOptimizer
from zeroamp.deepspeed.refused import REFUSED, refusal, unknown
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import StepError
from zeroamp.policies.policy import Policy
from zeroamp.training.callbacks import Callback
from zeroamp.training.refused_arguments import Scheduler, refuse_loss
from zeroamp.training.step import TrainStep, driver_of
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import reshard, wrap_state
from zeroamp.wrapping.step_state import Phase

logger = logging.getLogger("zeroamp")

engines: "WeakSet[DeepSpeedEngine]" = WeakSet()
"""The engines of this process. Functions of `utils` find a parameter's optimizer here."""


class _CountAgain(Callback):
    """Resets an engine's count of micro-batches when its optimizer step is discarded, as by `zero_grad`."""

    def __init__(self, engine: "DeepSpeedEngine") -> None:
        self._engine = engine

    def on_step_discarded(self) -> None:
        self._engine._num_accumulated = 0


class DeepSpeedEngine(EngineConfig, nn.Module):
    """Trains a wrapped model with the calls of DeepSpeed's engine. `initialize` makes it.

    Other attributes are those of `module`::

        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()  # updates after the last micro-batch of an optimizer step
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Policy,
        train_step: TrainStep | None,
        *,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        EngineConfig.__init__(self, policy, wrap_state(module).mesh.size())
        self.module = module
        """The wrapped model."""
        self.train_step = train_step
        """The `TrainStep` inside, for callbacks and reports; None without an optimizer."""
        self.optimizer = None if train_step is None else ZeroOptimizer(self, train_step.optimizers[0])
        """The optimizer that `initialize` returns; None without an optimizer."""
        self.training_dataloader: Any = None
        self.collate_fn = collate_fn
        self._drop_last = drop_last
        self.report: StepReport | None = None
        """The report of the last optimizer step: loss, gradient norm, learning rates."""
        self.global_steps = 0
        """Optimizer steps, skipped ones included."""
        self.global_samples = 0
        """Samples of all ranks in these steps, counted by the batch size of the config."""
        self.micro_steps = 0
        """Calls of `step`."""
        self._num_accumulated = 0  # micro-batches since the last optimizer step
        self._is_destroyed = False
        self._has_warned = False  # about zero_grad between micro-batches
        self._step_applied = False
        self._boundary: bool | None = None
        self._in_no_sync = False
        self._is_compiled = False
        if train_step is not None:
            train_step.callbacks.append(_CountAgain(self))
        engine_checkpoint.guard_state_dict(module)
        engines.add(self)

    # Forward, backward, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward of one micro-batch. Reduce gradients if it is the last one of its optimizer step.

        Args:
            loss: a tensor of one element, without loss scaling.
            retain_graph: refused if True.
            scale_wrt_gas: whether to divide the loss by `gradient_accumulation_steps()`.

        Returns:
            The divided loss, detached, in the dtype of `loss`. The backward divides it in fp32.

        Raises:
            StepError: `TrainStep.backward` raises it, or the engine has no optimizer.
            UnsupportedError: `retain_graph` is True.
        """
        train_step = self._trained("backward")
        if retain_graph:
            raise refusal("engine.backward(retain_graph=True)", "Add the losses, and call backward once.")
        refuse_loss(loss)
        steps = self.gradient_accumulation_steps()
        # Reproducible gradients are divided once, after the sum over all micro-batches.
        divide = scale_wrt_gas and self.policy.reproducible and steps == self.policy.gradient_accumulation_steps
        divided = loss.float() / steps if scale_wrt_gas and not divide else loss
        is_last = self.is_gradient_accumulation_boundary() and not self._in_no_sync
        train_step.backward(divided, is_last=is_last, divide=divide)
        return loss.detach() / self.gradient_accumulation_steps() if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Clip and update after the last micro-batch of an optimizer step. After others, only count the micro-batch.

        Args:
            lr_kwargs: refused unless empty.

        Raises:
            StepError: `TrainStep.step` raises it; inside `no_sync`; or the engine has no optimizer.
            UnsupportedError: `lr_kwargs` is not empty.
        """
        train_step = self._trained("step")
        if lr_kwargs:
            raise refusal(
                "engine.step(lr_kwargs=)", "Leave the scheduler out of initialize(), and step it yourself with them."
            )
        if self._in_no_sync:
            raise StepError("engine.step was called inside no_sync(). Run one backward after no_sync(), then step().")
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            if wrap_state(train_step.model).step.phase is Phase.IDLE:
                raise StepError(
                    "engine.step was called without a backward of the engine since the last optimizer step. Call "
                    "engine.backward(loss) before it, instead of loss.backward()."
                )
            try:
                self.report = train_step.step()
            finally:
                if driver_of(train_step).is_between_steps:  # also after an error that ended the optimizer step
                    self._num_accumulated = 0
            if self.report is None:
                raise AssertionError("expected a report of the optimizer step, got None")
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            self._step_applied = not self.report.skipped
        else:
            self._num_accumulated += 1
        self.micro_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Discard the gradients since the last optimizer step. The count of micro-batches continues, as in DeepSpeed.

        `step` discards gradients after an update, so no loop needs this call. A call between the micro-batches of an
        optimizer step logs a warning once: the update will lack the micro-batches before the call.
        """
        if self.train_step is None:
            return
        num_done, num_accumulated = wrap_state(self.module).step.num_micro_batches, self._num_accumulated
        self.train_step.zero_grad()
        self._num_accumulated = num_accumulated
        if num_done > 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "zero_grad discarded the gradients of %d of the %d micro-batches of an optimizer step, so its update "
                "will lack them. Remove the call: engine.step() discards gradients after the update.",
                num_done,
                self.gradient_accumulation_steps(),
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication, at stages 0 and 1: no backward inside ends an optimizer step.

        Raises:
            StepError: at stages 2 and 3, where every backward reduces; or inside another no_sync().
        """
        if self.policy.stage >= 2:
            raise StepError(
                f"engine.no_sync was called at ZeRO stage {self.policy.stage}, where every backward "
                "reduces gradients. Call set_gradient_accumulation_boundary(False) instead, or use stage 0 or 1."
            )
        if self._in_no_sync:
            raise StepError("engine.no_sync was called inside another no_sync(). One is enough.")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the following backwards are the last ones of an optimizer step. None: decide it by counting.

        Call it before the forward. With it, an optimizer step may have any number of micro-batches, and `step` may be
        called once at its end.
        """
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of its optimizer step."""
        if self._boundary is not None:
            return self._boundary
        return self._num_accumulated + 1 >= self.gradient_accumulation_steps()

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` updated the parameters."""
        return self._step_applied

    def _trained(self, method: str) -> TrainStep:
        if self._is_destroyed:
            raise StepError(f"engine.{method} was called after engine.destroy(). Call initialize() with a new model.")
        if self.train_step is None:
            raise StepError(
                f"engine.{method} was called, but initialize() got no optimizer. Pass optimizer=, or write "
                '"optimizer" in the config.'
            )
        return self.train_step

    def dataloader_drop_last(self) -> bool:
        """Return the config's `dataloader_drop_last`: whether `deepspeed_io` leaves out a smaller last batch."""
        return self._drop_last

    # Numbers of the last step

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped because of a non-finite gradient."""
        return 0 if self.train_step is None else self.train_step.num_skipped

    @property
    def cur_scale(self) -> float:
        """The factor of the next loss, by loss scaling. 1 except in float16."""
        return 1.0 if self.train_step is None else self.train_step.loss_scale

    @property
    def lr_scheduler(self) -> Scheduler | None:
        """The scheduler that `initialize` returns. The engine steps it after each update."""
        return None if self.train_step is None else self.train_step.schedulers[0]

    def get_global_grad_norm(self) -> float | None:
        """Return the 2-norm of the last optimizer step's averaged gradient before clipping; None before the first step.

        The loss scale is removed. inf or nan after an overflow. Waits for the device.
        """
        return None if self.report is None else self.report.grad_norm

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each param group."""
        return self._of_groups("lr")

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of each param group. A scheduler sets its own after the next update."""
        for group in self._trained("set_lr").optimizers[0].param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return the betas, or for optimizers without betas the momentum, of each param group."""
        return self._of_groups("betas", "momentum")

    def get_type(self) -> list[Any]:
        """Return the entry "type" of each param group, or 0.0 if it has none."""
        return self._of_groups("type")

    def _of_groups(self, *keys: str) -> list[Any]:
        groups = [] if self.train_step is None else self.train_step.optimizers[0].param_groups
        return [next((group[key] for key in keys if key in group), 0.0) for group in groups]

    # Ranks and devices

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return device_of(wrap_state(self.module).mesh)

    @property
    def local_rank(self) -> int:
        """LOCAL_RANK of the environment, or 0."""
        return get_local_rank()

    @property
    def global_rank(self) -> int:
        """This process's rank among all ranks."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks, all of them data-parallel."""
        return dist.get_world_size()

    dp_world_size = world_size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks."""
        return dist.group.WORLD

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a torch `DataLoader` in which each rank sees its own part of `dataset`: see `data_loader`."""
        return data_loader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            shuffle=route == "train",
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=self._drop_last,
        )

    # The module

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Set the training mode of the engine and its module."""
        return super().train(mode)

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None
    ) -> None:
        """Compile the module's forward by `torch.compile`, in place.

        Args:
            backend: of `torch.compile`.
            compile_kwargs: other arguments of `torch.compile`.
            schedule: refused: zeroamp does not have DeepCompile's passes.
        """
        if schedule is not None:
            raise refusal("engine.compile(schedule=)", "zeroamp does not have DeepCompile. Leave it out.")
        self.module.compile(**{**(compile_kwargs or {}), "backend": backend})
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._is_compiled

    def empty_partition_cache(self) -> None:
        """Reshard the parameters that an evaluation left unsharded."""
        reshard(self.module.modules())

    def destroy(self) -> None:
        """Release gradients and unsharded parameters. The engine cannot train afterwards."""
        if self.train_step is not None:
            self.train_step.zero_grad()
        reshard(self.module.modules())
        self.train_step = self.optimizer = None
        self._is_destroyed = True

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The empty set: zeroamp has no sparse gradients."""
        return set()

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint of the training as `save_dir/tag`: see `engine_checkpoint.save`. All ranks call it."""
        return engine_checkpoint.save(
            self, save_dir, tag, client_state or {}, save_latest=save_latest, without_frozen=exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that `save_checkpoint` wrote: see `engine_checkpoint.load`. All ranks call it."""
        if not load_module_strict:
            raise refusal("engine.load_checkpoint(load_module_strict=False)", "Load weights with zeroamp.load_hf.")
        if custom_load_fn is not None:
            raise refusal("engine.load_checkpoint(custom_load_fn=)", "Load weights with zeroamp.load_hf.")
        only = engine_checkpoint.Parts(
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counts=not load_module_only,
        )
        return engine_checkpoint.load(self, load_dir, tag, only)

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights in the config's low precision as one file, and return True. All ranks call it.

        The first rank writes the file: by `torch.save`, or as safetensors if the name ends in ".safetensors". It needs
        CPU memory for the whole model; `zeroamp.export_hf` needs only as much as one of its files.
        """
        return engine_checkpoint.save_weights(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return whole weights and buffers on the CPU, in the low precision of the config. All ranks call it.

        At stages 1 to 3 use it instead of `engine.module.state_dict()`, which raises there.
        """
        return engine_checkpoint.whole_state_dict(self, exclude_frozen_parameters)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's `state_dict()`, with "module." before each name. Raises StepError at stages 1 to 3."""
        stage = self.policy.stage
        return engine_checkpoint.whole_or_error(stage, super().state_dict, depth=2)(*args, **kwargs)

    _zero3_consolidated_16bit_state_dict = module_state_dict  # accelerate and many scripts call it

    def __getattr__(self, name: str) -> Any:
        if name in READERS:
            return partial(READERS[name], self.policy)
        try:
            return super().__getattr__(name)  # the engine's own submodule: `module`
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
        if f"engine.{name}" in REFUSED:
            raise refusal(f"engine.{name}", REFUSED[f"engine.{name}"])
        if name.startswith("__"):
            raise AttributeError(name)
        raise unknown(
            "The engine (and its module)",
            name,
            (*READERS, *(each for each in dir(type(self)) if not each.startswith("_"))),
        )
