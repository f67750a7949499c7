"""`TrainStep`: accumulation, the flags of each ZeRO stage between micro-batches, loss scale, norm, clipping, update."""

import math
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import modules_to_run
from zeroamp.planning.mesh import device_of, process_group, replicate_size
from zeroamp.recovery.recovery import Recovery
from zeroamp.reporting.monitors import attach_monitors
from zeroamp.training import update as local_update
from zeroamp.training.callbacks import StepWatchers, tell_observers
from zeroamp.training.checks import Scheduler, misuse, refuse_foreign, refuse_metric, refuse_unfinished_window
from zeroamp.training.loss_scale import LossScaler
from zeroamp.training.norm import clip_factor, local_sum_of_squares, multiply_gradients
from zeroamp.training.report import StepReport, learning_rates, log_step
from zeroamp.training.stages import set_flags
from zeroamp.wrapping.state import reshard, wrap_state


class TrainStep:
    """Drives the training step of a wrapped model.

    Call `backward(loss)` after each forward and `step()` after each backward; `step` acts at the end of an accumulation
    window and returns None inside it.
    """

    _has_monitors = True  # whether those of the config are attached

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None = None) -> None:
        """Take a model that `wrap_model` returned and an optimizer that was built after it.

        Raises:
            StepError: the optimizer holds parameters that are not the wrapped model's, or the scheduler needs a metric.
            WrapError: the model is not wrapped.
        """
        self.model = model
        self.optimizer = optimizer
        refuse_metric(scheduler)
        self.scheduler = scheduler
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Optimizer steps skipped because a gradient was not finite."""
        self._state = wrap_state(model)
        self.saving = self._state.saving
        """The save that is in the background."""
        # Not `model`: torch.compile puts a module of its own around it.
        self._root = cast(FSDPModule, self._state.root)
        self._units = [module for module in self._state.root.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        # Kept, because while a group is unsharded `model.parameters()` yields other objects, without gradients.
        self._parameters = list(self._state.root.parameters())
        refuse_foreign(optimizer, self._parameters)
        self._recovery = Recovery(self._state, process_group(self._state.mesh))
        policy = self._state.plan.policy
        self._scaler = LossScaler(
            policy.loss_scale, self._state.mesh.device_type, enabled=policy.low_dtype == torch.float16
        )
        self._num_micro_batches = 0  # of this window that were run backward
        self._is_stepped = True  # whether `step` was called since the last backward
        self._loss_sum: torch.Tensor | None = None  # 0-D fp32, this rank's, of this window
        self.watchers = StepWatchers()
        """Told of every step; `RunReport` adds itself."""
        if self._has_monitors:
            attach_monitors(self)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch: `loss` (a scalar) divided by the accumulation steps.

        Raises:
            StepError: `step` was not called since the last backward, `loss` is no scalar, or something raised
                without a `recover` after it.
        """
        policy = self._state.plan.policy
        self._recovery.refuse_after_failure("backward")
        if not self._is_stepped:
            raise misuse("backward", "no step() since the last one", "step() after each", "Call it.")
        if loss.numel() != 1:
            raise misuse("backward", f"a loss of shape {tuple(loss.shape)}", "a scalar", "Reduce it.")
        is_last = self._num_micro_batches + 1 == policy.gradient_accumulation_steps
        if self._state.shard_accumulator is not None:
            self._state.shard_accumulator.watch(self._parameters)
        set_flags(self._state, self._units, is_first=self._num_micro_batches == 0, is_last=is_last)
        # In fp32: a float16 loss times its scale would overflow.
        self._run_backward(self._scaler.scale_loss(loss.float() / policy.gradient_accumulation_steps))
        detached = loss.detach().float().reshape(())
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        self._num_micro_batches += 1
        self._is_stepped = False

    def _run_backward(self, loss: torch.Tensor) -> None:
        guard = self._state.guard
        if guard is not None:
            guard.armed = True
        try:
            ranges = self._state.ranges
            with self._recovery.noting("backward"), ranges.inside("backward"), self.watchers.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
                for unit in self._units:
                    modules_to_run(unit).clear()
        finally:
            if guard is not None:
                guard.armed = False

    def step(self) -> StepReport | None:
        """At the end of an accumulation window: norm, clip, update, schedule, zero the gradients. Else None.

        Raises:
            StepError: there was no backward since the last call, or something raised without a `recover` after it.
            PeerError: another rank failed in this window. Nothing was updated.
            CheckpointError: a save in the background failed. The step was taken.
        """
        policy = self._state.plan.policy
        self._recovery.refuse_after_failure("step")
        if self._is_stepped:
            raise misuse("step", "no backward since the last one", "backward(loss) first", "Call it.")
        self._is_stepped = True
        if self._num_micro_batches < policy.gradient_accumulation_steps:
            return None
        with self.watchers.phase("optimizer"):
            report = self._end_window()
        self.watchers.step_done(report)
        tell_observers(self._state.root)
        self.saving.raise_if_failed()
        return report

    def _end_window(self) -> StepReport:
        try:
            with self._state.ranges.inside("norm"):
                with self._recovery.noting("step"):
                    self._reshard()
                    if self._state.shard_accumulator is not None:
                        self._state.shard_accumulator.flush()
                    loss, squares = self._local_statistics()
                totals = self._recovery.sum_over_ranks(loss, squares, bool(self._with_gradient()))
            self.saving.poll()  # before an optimizer that may raise on one rank alone
            return self._update(*totals)
        finally:  # whatever it raised, the next backward begins a new window
            self._drop_gradients()
            self._num_micro_batches, self._loss_sum = 0, None

    def recover(self) -> int:
        """Bring this rank and the others together again after an exception; call it on every rank that saw one.

        The others raise PeerError from `step`. The window is dropped on all ranks: gradients, and what it did to
        buffers. Call it outside of the except block, which keeps the tensors of the failed forward alive. See
        docs/recovery.md.

        Returns:
            The micro-batches of the window that this rank did not come to: leave out as many, to be where others are.

        Raises:
            StepError: training cannot go on from here, only from a checkpoint.
        """
        num_taken = self._num_micro_batches + self._is_stepped  # if stepped, the next one had begun
        num_left = (self._state.plan.policy.gradient_accumulation_steps - num_taken) * self._recovery.is_cut_short
        self._drop_gradients()  # first: the recovery needs some memory
        self._recovery.recover()
        self.watchers.drop_window()
        self._num_micro_batches, self._loss_sum, self._is_stepped = 0, None, True
        return num_left

    def _drop_gradients(self) -> None:
        if self._state.shard_accumulator is not None:
            self._state.shard_accumulator.drop()
        for parameter in self._parameters:  # also those that the optimizer does not hold
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of steps and the loss scale, as plain numbers; optimizer and scheduler have their own.

        Raises:
            StepError: inside an accumulation window, whose gradients would be lost.
        """
        refuse_unfinished_window("state_dict", self._num_micro_batches)
        return {"num_steps": self.num_steps, "num_skipped": self.num_skipped, "loss_scale": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            StepError: inside an accumulation window, or the state's kind of loss scale is not the config's.
        """
        refuse_unfinished_window("load_state_dict", self._num_micro_batches)
        if "loss_scale" in state:
            self._scaler.load_state_dict(state["loss_scale"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]

    def _update(self, loss: torch.Tensor, sum_of_squares: torch.Tensor) -> StepReport:
        """Norm, overflow check, unscale and clip in one pass, update or skip."""
        scale = self._scaler.scale
        norm = sum_of_squares.sqrt() / scale
        policy = self._state.plan.policy
        skipped = self._scaler.overflowed(norm, self.num_steps) or (
            policy.check_grad_overflow and not math.isfinite(float(norm))
        )
        rates = learning_rates(self.optimizer)
        if not skipped:
            if policy.gradient_clipping > 0 or scale != 1.0:
                with self._state.ranges.inside("clip"):
                    factor = clip_factor(norm.float(), policy.gradient_clipping) / scale
                    multiply_gradients(self._with_gradient(), factor)
            name = type(self.optimizer).__name__
            with self._recovery.noting("optimizer.step"), self._state.ranges.inside("optimizer", name):
                local_update.step(self.optimizer)
            self.num_steps += 1
            if self.scheduler is not None:
                self.scheduler.step()
        self.num_skipped += skipped
        report = StepReport(
            step=self.num_steps,
            loss_tensor=loss,
            grad_norm_tensor=norm.float(),
            loss_scale=scale,
            skipped=skipped,
            num_skipped=self.num_skipped,
            is_scale_exhausted=self._scaler.is_exhausted,
            lr_values=rates,
        )
        if policy.steps_per_print and (self.num_steps + self.num_skipped) % policy.steps_per_print == 0:
            log_step(report, self.num_skipped, self.optimizer, self._state.mesh)
        return report

    def _reshard(self) -> None:
        """Put the sharded parameters back, which the optimizer updates.

        After a backward they are; after an evaluation in between they may not be.
        """
        reshard(self._units)

    def _with_gradient(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.grad is not None]

    def _local_statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the mean loss and of the sum of squares of the scaled gradient, both 0-D fp64.

        Ranks that hold the same shard count it once: each contributes its part of the squares.
        """
        if self._loss_sum is None:
            raise AssertionError("expected at least one backward in this window, got none")
        mesh = self._state.mesh
        device = device_of(mesh)  # which the collective needs, wherever loss and shards are
        loss = self._loss_sum.to(device, torch.float64) / (self._num_micro_batches * mesh.size())
        return loss, local_sum_of_squares(self._with_gradient(), device) / replicate_size(mesh)
