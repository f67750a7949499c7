"""`StepDriver`: runs the optimizer steps of a wrapped model. `TrainStep` and the integrations call it.

An optimizer step goes through the phases of `StepState`:

    IDLE -- backward --> OPEN -- last backward --> REDUCED -- clip --> CLIPPED -- update --> IDLE

`discard` leads back to IDLE from every phase, and an error of a backward or step to FAILED.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.hooks.observers.trace_labels import label
from zeroamp.planning.mesh import device_of, is_first_rank
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import StepError
from zeroamp.training.all_reduce import StepAllReduce
from zeroamp.training.callbacks import Callbacks
from zeroamp.training.loop_mistakes import SchedulerSteps
from zeroamp.training.loss_scaler import LossScaler
from zeroamp.training.micro_batches import MicroBatches
from zeroamp.training.norm_and_clip import clip_factor, multiply_gradients
from zeroamp.training.optimizer_kinds import checked_on_shards, refuse_unsupported, shard_loaded_state
from zeroamp.training.rank_agreement import Done, RankAgreement, description_of
from zeroamp.training.refused_arguments import (
    Scheduler,
    refuse_different_factors,
    refuse_foreign,
    refuse_loss,
    refuse_set_by_caller,
    refuse_unusable,
)
from zeroamp.training.step_report import StepReport, learning_rates
from zeroamp.training.update import OptimizerUpdate
from zeroamp.wrapping.run_alike import Description, run_alike
from zeroamp.wrapping.state import reshard, wrap_state
from zeroamp.wrapping.step_state import Phase

logger = logging.getLogger("zeroamp")


@dataclass(slots=True)
class Clipped:
    """The results of `StepDriver.clip` that `update` needs."""

    loss: torch.Tensor
    """0-D fp64: see `StepReport.loss_tensor`."""
    norm: torch.Tensor
    """0-D fp32: unscaled, before clipping."""
    scale: float
    """The loss scale of this step's losses."""
    skipped: bool = False
    """Whether a gradient is not finite, so that nothing is updated."""


class StepDriver:
    """Runs the optimizer steps of a wrapped model, one backward, clip and update after the other."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Scheduler | None],
        on_shards: bool | Sequence[bool],
    ) -> None:
        """See `TrainStep`. `schedulers` has an entry per optimizer."""
        self.optimizers = tuple(optimizers)
        self.schedulers = tuple(schedulers)
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Optimizer steps skipped because a gradient was not finite."""
        self.state = wrap_state(model)
        self.micro_batches = MicroBatches(self.state)
        self.callbacks = Callbacks(self.state.callbacks)
        self._policy = self.state.plan.policy
        self.step_state = self.state.step
        self._on_shards = checked_on_shards(on_shards, len(self.optimizers))
        run_alike(
            self._checked,
            what="TrainStep",
            remedy="Pass the same optimizers and schedulers on all ranks.",
            error_type=StepError,
            group=self.state.world,
            device=device_of(self.state.mesh),
        )
        self._num_held = _num_held(self.optimizers)
        self.updates = [
            OptimizerUpdate(optimizer, self.state, on_shards=on_shards)
            for optimizer, on_shards in zip(self.optimizers, self._on_shards, strict=True)
        ]
        self._agreement: RankAgreement | None = None
        if (
            self.state.axes.whole.size() > 1 and dist.get_backend(self.state.world) != "fake"
        ):  # the fake backend sums nothing
            self._agreement = RankAgreement(self.state, self.optimizers)
        self.all_reduce = StepAllReduce(self.state, self.micro_batches, self.callbacks, self._agreement)
        is_float16 = self._policy.low_dtype == torch.float16
        self.scaler = LossScaler(self._policy.loss_scale, enabled=is_float16)
        self.scheduler_steps = SchedulerSteps()
        self._is_in_no_sync = False
        self._has_warned = False  # about a loss in low precision
        self.clipped: Clipped | None = None  # between clip and update

    def _checked(self) -> tuple[None, Description]:
        self.micro_batches.refuse_low_shards()
        refuse_different_factors(self.state.root)
        refuse_unusable(self.optimizers, self.schedulers, self.state.root, self.micro_batches.parameters)
        for optimizer, on_shards in zip(self.optimizers, self._on_shards, strict=True):
            refuse_unsupported(optimizer, on_shards=on_shards)
            shard_loaded_state(optimizer, self.state.root)
            if not self.state.axes.is_plain:
                from zeroamp.meshes.tensor_parallel_replicas import refuse_on_two_axes

                refuse_on_two_axes(optimizer, on_shards=on_shards)
            for extension in self.state.extensions:
                extension.check_optimizer(optimizer, on_shards=on_shards)
        return None, description_of(self.state.root, self.optimizers, self.schedulers, self._on_shards)

    @property
    def phase(self) -> Phase:
        """The phase of this driver's optimizer step. IDLE during a step of another `TrainStep` of the model."""
        is_of_other = self.step_state.is_open and self.step_state.owner is not self.micro_batches
        return Phase.IDLE if is_of_other else self.step_state.phase

    @property
    def is_between_steps(self) -> bool:
        """Whether the optimizer step has not run a backward yet, or a failure has ended it."""
        return self.phase in (Phase.IDLE, Phase.FAILED)

    @property
    def is_reduced(self) -> bool:
        """Whether the last backward of this driver's optimizer step has run."""
        return self.phase in (Phase.REDUCED, Phase.CLIPPED)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make the backwards inside the context others than the last of their optimizer step."""
        outer, self._is_in_no_sync = self._is_in_no_sync, True
        try:
            yield
        finally:
            self._is_in_no_sync = outer

    def backward(self, loss: torch.Tensor, *, is_last: bool | None, divide: bool) -> None:
        """Run the backward of one micro-batch. See `TrainStep.backward`."""
        self.micro_batches.refuse_after_failure("TrainStep.backward")
        if self.state.set_by_caller:
            refuse_set_by_caller(self.state)
        is_between_steps, is_by_caller = self.is_between_steps, is_last is not None or self._is_in_no_sync
        is_last = self._is_last(is_last)
        if is_between_steps:
            self._begin()
        step, arithmetic = self.step_state, self.micro_batches.arithmetic
        self.micro_batches.refuse_lost_gradients()
        refuse_loss(loss)
        divisor = arithmetic.loss_divisor(divide=divide, others=step.are_divided)
        # In fp32: a float16 loss times its scale would overflow.
        scaled = self.scaler.scale_loss(loss.float() / divisor if divisor > 1 else loss.float())
        if self._agreement is not None:
            self._agreement.issued.num_backwards += 1
        with self.micro_batches.noting("backward"), self.callbacks.phase("backward"):
            self.micro_batches.backward(scaled, is_last=is_last)
        if loss.dtype in LOW_DTYPES and not self._has_warned:
            self._warn_of_low_loss(loss.dtype)
        step.add_loss(loss, is_divided=divide, retains_each=arithmetic.retains_losses)
        step.gradient_scale = self.scaler.scale * arithmetic.gradient_divisor(divide)
        step.is_ended_by_caller, step.is_stepped, step.was_in_no_sync = is_by_caller, False, self._is_in_no_sync

    def _begin(self) -> None:
        """Check what the caller may have changed since the last optimizer step."""
        self.micro_batches.refuse_other_gradients()
        self.micro_batches.refuse_low_shards()
        self.clipped = None  # of a step that another TrainStep's zero_grad discarded
        if self._num_held != (num_held := _num_held(self.optimizers)):
            refuse_foreign(self.optimizers, self.micro_batches.parameters)
            self._num_held = num_held

    def _is_last(self, is_last: bool | None) -> bool:
        """Return whether a backward is the last of its optimizer step. Raise StepError if it contradicts the others."""
        step = self.step_state
        if self.phase is Phase.CLIPPED:
            raise StepError("TrainStep.backward was called between clip_grad_norm() and update(). Call update() first.")
        if self._is_in_no_sync and is_last:
            raise StepError("TrainStep.backward got is_last=True inside no_sync(). Run the last backward after it.")
        if self._is_in_no_sync:
            is_last = False
        elif is_last is None and not self.is_between_steps and step.was_in_no_sync:
            is_last = True
        is_by_caller = is_last is not None
        if not self.is_between_steps:
            if step.is_ended_by_caller != is_by_caller:
                raise StepError(
                    "TrainStep.backward got is_last for some micro-batches of an optimizer step, but not for all. Pass "
                    "it for each of them, or for none; no_sync() counts as is_last=False."
                )
            if self.is_reduced or (not is_by_caller and not step.is_stepped):
                raise StepError(
                    "TrainStep.backward was called twice without step() in between. Call step() after each backward. "
                    "For several losses of one micro-batch call it once, with their sum: backward(loss + other_loss)."
                )
        if is_last is not None:
            return is_last
        num_done = 0 if self.is_between_steps else step.num_micro_batches
        return num_done + 1 == self._policy.gradient_accumulation_steps

    def _warn_of_low_loss(self, dtype: torch.dtype) -> None:
        self._has_warned = True
        is_autocast = self._policy.mode == "autocast"  # some ops, such as a product of logits, are in bf16 under it
        how = "inside `with train.autocast():`, or, if it was there already, " if is_autocast else ""
        logger.warning(
            "TrainStep.backward got a loss in %s, which is rounded more than one in fp32. Compute it %sfrom "
            "logits.float().",
            *(short_name(dtype), how),
        )

    def step(self) -> StepReport | None:
        """Clip and update after the last micro-batch. See `TrainStep.step`."""
        self.micro_batches.refuse_after_failure("TrainStep.step")
        if self.phase is not Phase.CLIPPED:
            if self.is_between_steps or self.step_state.is_stepped:
                raise StepError(
                    "TrainStep.step was called without a backward since the last step. Call backward first."
                )
            if not self.is_reduced and not self.step_state.is_ended_by_caller:
                self.step_state.is_stepped = True
                return None
            self._refuse_incomplete("step")
        with self.callbacks.phase("optimizer"):
            if self.clipped is None:
                self._reduce_and_clip(self._policy.gradient_clipping)
            report = self._update(self.optimizers)
        return self._end(report)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Average, unscale and clip the gradients, and return their norm. See `TrainStep.clip_grad_norm`."""
        self._refuse_incomplete("clip_grad_norm")
        with self.callbacks.phase("optimizer"):
            return self._reduce_and_clip(max_norm).norm

    def _refuse_incomplete(self, method: str) -> None:
        if self.phase is Phase.CLIPPED:
            raise StepError(f"TrainStep.{method} was called twice in one optimizer step. Call update() after it.")
        if not self.is_reduced:
            when = "without a backward" if self.is_between_steps else "before the last micro-batch of an optimizer step"
            raise StepError(
                f"TrainStep.{method} was called {when}. Call it after the backward that ends the step: the config's "
                "last, or the one with is_last=True."
            )

    def _reduce_and_clip(self, max_norm: float) -> Clipped:
        """Run the step's all-reduce, check for overflow, unscale and clip in one pass.

        Only in float16, and if steps that are not finite are skipped, the host waits for the norm.
        """
        step = self.step_state
        if self._agreement is not None:
            done = (self.num_steps, self.num_skipped, step.num_divided, step.is_ended_by_caller)
            self._agreement.done = Done(*done, max_norm, self.scaler.scale, self.state.root.training)
        divisor = self.micro_batches.arithmetic.gradient_divisor(step.are_divided)
        scale = self.scaler.scale * divisor  # of the gradients
        try:
            with label("norm"):
                loss, norm = self.all_reduce.run(step.loss_sums(), scale=scale)
            clipped = Clipped(loss, norm.float(), self.scaler.scale)
            if self.scaler.enabled or self._policy.skip_nonfinite_steps or self._policy.check_grad_overflow:
                on_host = float(norm)
                clipped.skipped = self.scaler.overflowed(on_host, self.num_steps) or not math.isfinite(on_host)
            if not clipped.skipped and (max_norm > 0 or scale != 1.0):
                with label("clip"):
                    factor = clip_factor(clipped.norm, max_norm) / scale
                    multiply_gradients(self.micro_batches.with_gradient(), factor)
                step.gradient_scale = 1.0
        except BaseException:  # after any error, the next backward begins a new optimizer step
            self._finish()
            raise
        self.clipped, step.phase = clipped, Phase.CLIPPED
        return clipped

    def update(self, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> StepReport:
        """Update the parameters after `clip`. See `TrainStep.update`.

        `optimizers`: which of the optimizers step, with their schedulers. Gradients of the others are discarded. None:
        all of them.
        """
        optimizers = self.optimizers if optimizers is None else optimizers
        self.refuse_update("update", optimizers)
        with self.callbacks.phase("optimizer"):
            report = self._update(optimizers)
        return self._end(report)

    def refuse_update(self, method: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise StepError unless `clip` was called, and all of `optimizers` belong to this driver."""
        self.micro_batches.refuse_after_failure(f"TrainStep.{method}")
        if self.phase is not Phase.CLIPPED:
            raise StepError(f"TrainStep.{method} was called without clip_grad_norm(). Call it first, or step() alone.")
        for optimizer in optimizers:
            if not any(optimizer is own for own in self.optimizers):
                raise StepError(
                    f"TrainStep.{method} was given a {type(optimizer).__name__} that is not one of this TrainStep. "
                    "Pass those of TrainStep.optimizers."
                )

    def step_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step these optimizers after `clip`, unless the optimizer step is skipped. It stays open."""
        for callback in self.callbacks.all():
            callback.before_update()
        if optimizers:  # a forward since the backward, or one of a callback, may have left the old weights unsharded
            reshard(self.micro_batches.units)
        if self.clipped is None:
            raise AssertionError("expected the results of clip")
        if not self.clipped.skipped:
            for update in self.updates:
                if any(update.optimizer is optimizer for optimizer in optimizers):
                    with label("optimizer", type(update.optimizer).__name__):
                        update.step()

    def _update(self, optimizers: Sequence[torch.optim.Optimizer]) -> StepReport:
        clipped = self.clipped
        if clipped is None:
            raise AssertionError("expected the results of clip")
        try:
            self.scheduler_steps.check()
            with self.micro_batches.noting("optimizer.step"):
                rates = tuple(rate for optimizer in self.optimizers for rate in learning_rates(optimizer))
                self.step_optimizers(optimizers)
                if not clipped.skipped:
                    self.num_steps += 1
                    for index, (own, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
                        if scheduler is not None and any(own is optimizer for optimizer in optimizers):
                            self.scheduler_steps.step(index, scheduler)
            self.num_skipped += clipped.skipped
            report = StepReport(
                step=self.num_steps,
                loss_tensor=clipped.loss,
                grad_norm_tensor=clipped.norm,
                loss_scale=clipped.scale,
                skipped=clipped.skipped,
                num_skipped=self.num_skipped,
                lr_values=rates,
            )
            every = self._policy.steps_per_print
            if every and (self.num_steps + self.num_skipped) % every == 0 and is_first_rank(self.state.axes.whole):
                logger.info("%s", report)  # waits for the device
            return report
        finally:
            self._finish()

    def _end(self, report: StepReport) -> StepReport:
        with ExitStack() as calls:  # runs all of them, last pushed first, even if one raises
            for callback in reversed(self.callbacks.all()):
                calls.callback(callback.on_step_end, report)
        return report

    def _finish(self) -> None:
        self.micro_batches.end()
        self.clipped = None

    def recover(self) -> None:
        """Make steps possible after a failed one, whose parameters and state have been loaded again."""
        self.micro_batches.recover()
        self.discard()

    def discard(self) -> None:
        """Discard the current optimizer step and all gradients of the model. See `TrainStep.zero_grad`."""
        self.micro_batches.refuse_after_failure("TrainStep.zero_grad")
        self.micro_batches.discard()
        self.clipped = None
        for callback in self.callbacks.all():
            callback.on_step_discarded()


def _num_held(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the number of parameters that the optimizers hold. `add_param_group` changes it."""
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
