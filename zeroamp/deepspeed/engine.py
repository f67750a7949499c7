"""`DeepSpeedEngine`: the interface of DeepSpeed's engine for a wrapped model and its `TrainStep`."""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.deepspeed import engine_checkpoint
from zeroamp.deepspeed.comm import get_local_rank
from zeroamp.deepspeed.optimizer import ZeroOptimizer
from zeroamp.deepspeed.refused import REFUSED, refusal, unknown
from zeroamp.host_memory.sleep import Part, sleep, wake
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import ConfigError, StepError
from zeroamp.policies.policy import Policy
from zeroamp.rank_group import RankGroup
from zeroamp.training.optimizer_step import Step
from zeroamp.training.refused_arguments import Scheduler
from zeroamp.training.step import TrainStep, step_of
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import reshard, wrap_state
from zeroamp.wrapping.step_state import StepPhase

logger = logging.getLogger("zeroamp")

_OFFLOADED: dict[str, Part] = {
    "optim_states": "optimizer",
    "hp_params": "params",
    "lp_params": "params",
    "lp_grads": "grads",
    "contiguous_grad_buffer": "grads",
}
"""DeepSpeed's name of a state -> ours. Weights in low and in high precision are one here."""


def _is_dynamic(policy: Policy) -> bool:
    return policy.low_dtype == torch.float16 and policy.loss_scale.dynamic


READERS: dict[str, Callable[[Policy], object]] = {
    "bfloat16_enabled": lambda policy: policy.mode == "bf16",
    "dynamic_loss_scale": _is_dynamic,
    "fp16_enabled": lambda policy: policy.mode == "fp16",
    "gradient_accumulation_steps": lambda policy: policy.gradient_accumulation_steps,
    "gradient_clipping": lambda policy: policy.gradient_clipping,
    "loss_scale": lambda policy: 0.0 if _is_dynamic(policy) else policy.loss_scale.initial,
    "steps_per_print": lambda policy: int(policy.steps_per_print),
    "torch_autocast_enabled": lambda policy: policy.mode == "autocast",
    "wall_clock_breakdown": lambda _: False,  # a RunReport has the times
    "zero_optimization": lambda policy: policy.stage > 0,
    "zero_optimization_partition_weights": lambda policy: policy.stage == 3,
    "zero_optimization_stage": lambda policy: policy.stage,
}
"""Method of the engine without arguments -> the value of the config that it returns."""


def _add_backward(step: Step, loss: torch.Tensor, *, divide: bool) -> None:
    """Run another backward of the last micro-batch: its gradients and its loss are added. Raises as `TrainStep`."""
    current = step.current
    before = current.is_counted, current.was_in_no_sync, current.num_micro_batches
    num_divided = current.num_divided or int(divide)
    step.backward(loss, last=step.phase is StepPhase.COMPLETE, divide=divide)
    current.is_counted, current.was_in_no_sync, current.num_micro_batches = before
    current.num_divided = num_divided


class DeepSpeedEngine(nn.Module):
    """Trains a wrapped model with the calls of DeepSpeed's engine. `initialize` makes it.

    Other attributes are those of `module`::

        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()  # updates after the last micro-batch of an optimizer step
    """

    def __init__(self, module: nn.Module, policy: Policy, train_step: TrainStep | None) -> None:
        super().__init__()
        self.module = module
        """The wrapped model."""
        self.policy = policy
        """The config as zeroamp's `Policy`."""
        self.train_step = train_step
        """The `TrainStep` inside, for callbacks and reports; None without an optimizer."""
        self.optimizer = None if train_step is None else ZeroOptimizer(self, train_step.optimizers[0])
        """The optimizer that `initialize` returns; None without an optimizer."""
        self.training_dataloader: Any = None
        """The data loader that `initialize` returns; None without a dataset."""
        self.report: StepReport | None = None
        """The report of the last optimizer step: loss, gradient norm, learning rates."""
        self._boundary: bool | None = None
        self._step_applied = False
        engine_checkpoint.guard_state_dict(module)

    # Forward, backward, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward of one micro-batch. Reduce gradients if it is the last one of its optimizer step.

        Several backwards before a `step` belong to one micro-batch, and their gradients are added, as in DeepSpeed.

        Args:
            loss: a tensor of one element, without loss scaling.
            retain_graph: refused if True.
            scale_wrt_gas: whether to divide the loss by `gradient_accumulation_steps()`.

        Returns:
            The divided loss, detached, in the dtype of `loss`. The backward divides it in fp32.

        Raises:
            StepError: `TrainStep.backward` raises it, or the engine has no optimizer.
        """
        if retain_graph:
            raise refusal("engine.backward(retain_graph=True)", "Add the losses, and call backward once.")
        train_step, step = self._trained("backward"), wrap_state(self.module).step
        if not step.is_stepped and (step.is_counted or step.phase is StepPhase.COMPLETE):
            _add_backward(step_of(train_step), loss, divide=scale_wrt_gas)
        else:
            train_step.backward(loss, is_last=self._boundary, divide=scale_wrt_gas)
        return loss.detach() / self.policy.gradient_accumulation_steps if scale_wrt_gas else loss.detach()

    def step(self) -> None:
        """Clip and update after the last micro-batch of an optimizer step. Does nothing after others.

        Raises:
            StepError: `TrainStep.step` raises it, there was no `backward`, or the engine has no optimizer.
        """
        train_step = self._trained("step")
        if wrap_state(self.module).step.phase is StepPhase.IDLE:
            raise StepError(
                "engine.step was called without engine.backward(loss) since the last optimizer step. Call that instead "
                "of loss.backward()."
            )
        report = None if self._boundary is False else train_step.step()
        self._step_applied = report is not None and not report.skipped
        self.report = report or self.report

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Discard gradients between two optimizer steps. `step` does so after an update, so no loop needs this call.

        Raises:
            StepError: called between the micro-batches of an optimizer step, whose update would lack the earlier ones.
        """
        if wrap_state(self.module).step.is_open:
            raise StepError(
                "zero_grad was called between the micro-batches of an optimizer step, so its update would lack those "
                "before the call. Remove the call: engine.step() discards gradients after the update."
            )
        if self.train_step is not None:
            self.train_step.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for accumulation: no backward inside ends an optimizer step.

        At stages 0 and 1 there is no communication inside. At stages 2 and 3 each backward reduces gradients.
        """
        return self._trained("no_sync").no_sync()

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
        step = wrap_state(self.module).step
        current = step.num_micro_batches + step.is_stepped if step.is_open else 1  # counted until its `step`
        return current >= self.policy.gradient_accumulation_steps

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` updated the parameters."""
        return self._step_applied

    def _trained(self, method: str) -> TrainStep:
        if self.train_step is None:
            raise StepError(
                f"engine.{method} was called, but the engine has no optimizer: initialize() got none, or "
                'engine.destroy() was called. Pass optimizer= to initialize(), or write "optimizer" in the config.'
            )
        return self.train_step

    # Numbers

    def train_batch_size(self) -> int:
        """Return the samples of an optimizer step: micro-batch size x accumulation steps x ranks."""
        return self.train_micro_batch_size_per_gpu() * self.policy.gradient_accumulation_steps * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch. Raises ConfigError if the config has no batch size."""
        if self.policy.train_micro_batch_size_per_gpu is None:
            raise ConfigError(
                "The config of initialize() must have train_batch_size or train_micro_batch_size_per_gpu, but has "
                "neither. Add one."
            )
        return self.policy.train_micro_batch_size_per_gpu

    @property
    def global_steps(self) -> int:
        """Optimizer steps, skipped ones included."""
        return 0 if self.train_step is None else self.train_step.num_steps + self.train_step.num_skipped

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
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

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

    # The module

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the module's forward by `torch.compile`, in place, with these arguments."""
        self.module.compile(**{**(compile_kwargs or {}), "backend": backend})

    def empty_partition_cache(self) -> None:
        """Reshard the parameters that an evaluation left unsharded."""
        reshard(self.module.modules())

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move parts of the state to host memory by `zeroamp.sleep`, until `reload_states`.

        `include`: DeepSpeed's names or members of its enum. None: all. `device`: the CPU. `pin_memory` and
        `non_blocking` have no effect: memory is pinned on accelerators, and the copies end before the call does.
        """
        del pin_memory, non_blocking
        if str(getattr(device, "value", device)) != "cpu":
            raise ConfigError(f'engine.offload_states(device=) must be "cpu", but is {device!r}. Leave it out.')
        names = list(_OFFLOADED) if include is None else [str(getattr(each, "value", each)) for each in include]
        if unknown_names := [name for name in names if name not in _OFFLOADED]:
            raise ConfigError(
                f"engine.offload_states(include=) must be some of {', '.join(_OFFLOADED)}, but has {unknown_names[0]}."
            )
        optimizers = () if self.train_step is None else self.train_step.optimizers
        sleep(self.module, optimizers, list(dict.fromkeys(_OFFLOADED[name] for name in names)))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move what `offload_states` moved back to the device. `non_blocking` has no effect."""
        del non_blocking
        wake(self.module)

    def destroy(self) -> None:
        """Release gradients and unsharded parameters. The engine cannot train afterwards."""
        if self.train_step is not None:
            self.train_step.zero_grad()
        self.empty_partition_cache()
        self.train_step = self.optimizer = None

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint as `save_dir/tag`, and write the tag into `save_dir/latest`. All ranks call it.

        Args:
            save_dir: the run's folder, on a file system that all ranks share.
            tag: a folder name. None: global_step<number>. A checkpoint of the same tag is replaced once this one is on
                the disk.
            client_state: tensors, numbers, strings, None, and containers of them. A load returns the first rank's.
            save_latest: whether to write the tag into `latest`.
            exclude_frozen_parameters: whether to leave out frozen parameters.

        Returns:
            True.

        Raises:
            CheckpointError: `zeroamp.save_checkpoint` raises it, `save_dir` is None or empty, or the tag is not a
                folder name.
            StepError: called inside an optimizer step, or the engine has no optimizer.
        """
        train_step = self._trained("save_checkpoint")
        folder = engine_checkpoint.folder_of(save_dir, "save_checkpoint(save_dir=)")
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        save_checkpoint(
            engine_checkpoint.path_of(folder, name),
            self.module,
            train_step,
            step=self.global_steps,
            extra={"client_state": dict(client_state or {})},
            keep=1,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if save_latest:
            self._ranks().on_first(lambda: engine_checkpoint.write_latest(folder, name))
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that `save_checkpoint` wrote. All ranks call it.

        Args:
            load_dir: the folder given to `save_checkpoint`.
            tag: None: the one in `load_dir/latest`. If that file does not exist, a warning is logged and (None, None)
                is returned, as in DeepSpeed, so that a script can start a new run.
            load_module_strict: refused if False.
            load_optimizer_states: whether to load the optimizer's state.
            load_lr_scheduler_states: whether to load the scheduler's state.
            load_module_only: whether to load weights and nothing else.

        Returns:
            The path of the checkpoint, and the client state of the first rank.

        Raises:
            CheckpointError: `load_dir` is None or empty, the tag does not exist, DeepSpeed wrote it, or
                `zeroamp.load_checkpoint` raises it.
            StepError: called inside an optimizer step.
        """
        if not load_module_strict:
            raise refusal("engine.load_checkpoint(load_module_strict=False)", "Load weights with zeroamp.load_hf.")
        folder, ranks = engine_checkpoint.folder_of(load_dir, "load_checkpoint(load_dir=)"), self._ranks()
        name = ranks.on_first(lambda: engine_checkpoint.find(folder, None if tag is None else str(tag)))
        if name is None:
            if ranks.rank == 0:
                logger.warning("%s has no file latest, so nothing was loaded. Pass tag=, or another folder.", folder)
            return None, None
        extra = load_checkpoint(
            engine_checkpoint.path_of(folder, name),
            self.module,
            None if load_module_only else self.train_step,
            load_optimizer_states=load_optimizer_states and not load_module_only,
            load_lr_scheduler_states=load_lr_scheduler_states and self.lr_scheduler is not None,
            extra_rank=0,
        )
        if extra is None:
            raise AssertionError(f"expected client_state in {folder / name}, which engine.save_checkpoint wrote")
        return str(folder / name), extra["client_state"]

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write whole weights in the config's low precision as one file, and return True. All ranks call it.

        The first rank writes the file: by `torch.save`, or as safetensors if the name ends in ".safetensors". It needs
        CPU memory for the whole model; `zeroamp.export_hf` needs only as much as one of its files.
        """
        path = engine_checkpoint.folder_of(save_dir, "save_16bit_model(save_dir=)") / save_filename
        state_dict = self.module_state_dict(exclude_frozen_parameters)
        self._ranks().on_first(lambda: engine_checkpoint.write_weights(path, state_dict))
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return whole weights on the CPU, in the low precision of the config, on the first rank. All ranks call it.

        The other ranks get an empty dict. At stages 1 to 3 call it instead of `engine.module.state_dict()`.
        """
        dtype = self.policy.low_dtype or torch.float32
        return engine_checkpoint.whole_weights(self.module, dtype, without_frozen=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = module_state_dict  # accelerate and many scripts call it

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Raise UnsupportedError: call `engine.module_state_dict`."""
        raise refusal("engine.state_dict", "Call engine.module_state_dict() on all ranks.")

    def _ranks(self) -> RankGroup:
        return RankGroup.for_saving(wrap_state(self.module).axes.whole)

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
            (*READERS, *(each for each in vars(type(self)) if not each.startswith("_"))),
        )
