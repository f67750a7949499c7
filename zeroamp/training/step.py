"""`TrainStep`: runs the optimizer steps of a wrapped model, from the backwards of the micro-batches to the update."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.hooks.observers.trace_labels import label
from zeroamp.planning.mesh import device_of
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import StepError
from zeroamp.policies.extensions import load
from zeroamp.training.callbacks import Callbacks, call_observers
from zeroamp.training.loaded_state import shard_loaded_state
from zeroamp.training.loss_scaler import LossScaler
from zeroamp.training.losses import StepLosses
from zeroamp.training.micro_batches import MicroBatches
from zeroamp.training.norm_and_clip import clip_factor, multiply_gradients
from zeroamp.training.optimizer_kinds import checked_on_shards, refuse_on_two_axes, refuse_unsupported
from zeroamp.training.rank_agreement import Done, RankAgreement, description_of
from zeroamp.training.refused_arguments import (
    Scheduler,
    checked_max_norm,
    refuse_different_factors,
    refuse_foreign,
    refuse_loss,
    refuse_metric,
    refuse_unusable,
)
from zeroamp.training.statistics import StepStatistics
from zeroamp.training.step_report import StepReport, learning_rates, log_step
from zeroamp.training.step_sums import StepSums, step_sums_of
from zeroamp.training.update import OptimizerUpdate
from zeroamp.wrapping.rank_group import Description, run_alike
from zeroamp.wrapping.state import autocast_of, reshard, wrap_state

if TYPE_CHECKING:
    from zeroamp.checkpoint.background import Saving

logger = logging.getLogger("zeroamp")
T = TypeVar("T")


class TrainStep:
    """Drives the optimizer steps of a wrapped model.

    With `gradient_accumulation_steps` micro-batches per optimizer step, as the config sets::

        for batch in loader:
            train.backward(model(**batch).loss)
            report = train.step()  # None until the last micro-batch of an optimizer step

    With any number of micro-batches, where the caller marks the last one::

        for micro_batch in micro_batches:
            train.backward(loss_of(micro_batch), is_last=micro_batch is micro_batches[-1], divide=False)
        norm = train.clip_grad_norm()  # train.step() does both
        report = train.update()

    Examples:
        >>> policy = zeroamp.policy_from_config({"gradient_accumulation_steps": 2, "gradient_clipping": 1.0})
        >>> model = zeroamp.wrap_model(nn.Linear(8, 1), policy)
        >>> train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> train.backward(model(torch.ones(4, 8)).square().mean())
        >>> train.step() is None  # after the first of two micro-batches
        True
        >>> train.backward(model(torch.ones(4, 8)).square().mean())
        >>> train.step().step
        1
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Scheduler | Sequence[Scheduler | None] | None = None,
        *,
        on_shards: bool | Sequence[bool] = False,
    ) -> None:
        """Attach to a model that `wrap_model` returned, and to optimizers and schedulers built after that call.

        Args:
            model: the wrapped model, also inside `torch.compile`.
            optimizer: one, or several that hold different parameters. They step in this order.
            scheduler: None, or one per optimizer, each a scheduler or None. Stepped after each update.
            on_shards: True states that the optimizer is element-wise: its update of an element depends only on that
                element's gradient and state. The optimizer then gets this rank's shards as plain tensors instead of
                DTensors, which bitsandbytes needs. For several optimizers, pass one bool each. torch's own
                element-wise optimizers do not need this argument. See docs/optimizers.md.

        Raises:
            StepError: an optimizer holds parameters that are not the wrapped model's, two optimizers hold the same
                parameter, a trainable parameter is not sharded, the numbers of optimizers and schedulers differ, a
                scheduler needs a metric, or an optimizer needs a closure, sparse gradients, or whole parameters where
                they are sharded. Also if the arguments differ between ranks.
            WrapError: the model is not wrapped.
            ConfigError: a monitor of the config cannot be opened.
        """
        self.model = model
        self.optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        """All optimizers, in the order in which they step."""
        schedulers = scheduler if isinstance(scheduler, Sequence) else (scheduler,) * (scheduler is not None)
        self.schedulers: tuple[Scheduler | None, ...] = tuple(schedulers) or (None,) * len(self.optimizers)
        """One entry per optimizer: its scheduler, or None."""
        self._on_shards = checked_on_shards(on_shards, len(self.optimizers))
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Optimizer steps skipped because a gradient was not finite."""
        self._callbacks = Callbacks()
        self._state = wrap_state(model)
        self._policy = self._state.plan.policy
        self._world = self._state.world
        self.micro_batches = MicroBatches(self._state)
        """The micro-batches of the current optimizer step."""
        run_alike(
            self._checked,
            what="TrainStep",
            remedy="Pass the same optimizers and schedulers on all ranks.",
            error_type=StepError,
            group=self._world,
            device=device_of(self._state.mesh),
        )
        self._num_held = _num_held(self.optimizers)
        self._updates = [
            OptimizerUpdate(optimizer, self._state, on_shards=on_shards)
            for optimizer, on_shards in zip(self.optimizers, self._on_shards, strict=True)
        ]
        self._agreement: RankAgreement | None = None
        if (
            self._state.axes.whole.size() > 1 and dist.get_backend(self._world) != "fake"
        ):  # the fake backend sums nothing
            self._agreement = RankAgreement(self._state, self.optimizers)
        self.sums = StepSums()
        """Numbers that are summed over the ranks in each step of this TrainStep."""
        sums = (self.sums, step_sums_of(self._state))
        self._statistics = StepStatistics(self._state, self.micro_batches, self._callbacks, self._agreement, sums)
        is_float16 = self._policy.low_dtype == torch.float16
        self._scaler = LossScaler(self._policy.loss_scale, self._state.mesh.device_type, enabled=is_float16)
        self._losses = StepLosses(retains_each=self.micro_batches.arithmetic.retains_losses)
        self._is_stepped = True  # whether `step` was called since the last backward
        self._is_ended_by_caller: bool | None = None  # whether the caller passes `is_last` in this optimizer step
        self._is_in_no_sync = False
        self._was_in_no_sync = False  # whether the last backward ran inside no_sync
        self._has_warned = False  # about a loss in low precision
        self._pending: _PendingUpdate | None = None  # between clip_grad_norm and update
        for extension in self._state.extensions:
            extension.attach_step(self)

    def _checked(self) -> tuple[None, Description]:
        self.micro_batches.refuse_low_shards()
        refuse_different_factors(self._state.root)
        refuse_unusable(self.optimizers, self.schedulers, self._state.root, self.micro_batches.parameters)
        for optimizer, on_shards in zip(self.optimizers, self._on_shards, strict=True):
            refuse_unsupported(optimizer, on_shards=on_shards)
            shard_loaded_state(optimizer, self._state.root)
            if not self._state.axes.is_plain:
                refuse_on_two_axes(optimizer, on_shards=on_shards)
            for extension in self._state.extensions:
                extension.check_optimizer(optimizer, on_shards=on_shards)
        return None, description_of(self._state.root, self.optimizers, self.schedulers, self._on_shards)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only optimizer.

        Raises:
            StepError: there are several optimizers. Read `optimizers` instead.
        """
        return _only(self.optimizers, "optimizer")

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the only optimizer, or None.

        Raises:
            StepError: there are several optimizers. Read `schedulers` instead.
        """
        return _only(self.schedulers, "scheduler")

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler | None) -> None:
        if len(self.optimizers) != 1:
            raise StepError(
                "TrainStep.scheduler was set, but there are several optimizers. Pass schedulers to TrainStep."
            )
        refuse_metric(scheduler)
        self.schedulers = (scheduler,)

    @property
    def saving(self) -> "Saving":
        """The background save of a checkpoint. `train.saving.wait()`, on every rank, waits until it has ended."""
        saving: Saving = load("TrainStep.saving")(self._state)
        return saving

    @property
    def callbacks(self) -> Callbacks:
        """The callbacks of this TrainStep, called in the order of the list. See `zeroamp.Callback`."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: object) -> None:
        if callbacks is self._callbacks:  # train.callbacks += [...]
            return
        raise StepError(
            "TrainStep.callbacks was set, which would remove the callbacks of the config (monitors, saving). "
            "Call train.callbacks.append(callback) for each of yours."
        )

    @property
    def is_between_steps(self) -> bool:
        """Whether the current optimizer step has not run a backward yet."""
        return self.micro_batches.num_done == 0

    @property
    def loss_scale(self) -> float:
        """The factor by which the next `backward` multiplies its loss. 1 except in float16."""
        return self._scaler.scale

    @property
    def micro_batch_index(self) -> int:
        """The index of this rank's next micro-batch among those of all ranks in the optimizer step, from 0.

        After the last micro-batch, until `step` has ended the optimizer step, this is the last micro-batch's index.
        """
        index: int = load("TrainStep.micro_batch_index")(self)
        return index

    @property
    def micro_batch_indices(self) -> range:
        """The indices of this rank's micro-batches of an optimizer step among those of all ranks, in their order.

        A loop whose micro-batch depends only on the step and this index trains on the same data on any number of ranks.
        `zeroamp.MicroBatchSampler` assigns samples in this way. docs/reproducible.md has the order.
        """
        indices: range = load("TrainStep.micro_batch_indices")(self)
        return indices

    @property
    def micro_batch_seed(self) -> int:
        """The seed of this rank's next micro-batch, below 2^63: a function of `zeroamp.seed`, step and index.

        The generators have this seed when its forward begins. Use it for random numbers that the loop draws before the
        forward, noise for example: `torch.Generator().manual_seed(train.micro_batch_seed)`.

        Raises:
            StepError: `zeroamp.reproducible` is false.
        """
        seed: int = load("TrainStep.micro_batch_seed")(self)
        return seed

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast of the config, for a loss that is computed outside of the model's forward.

        With `torch_autocast` this is `torch.autocast(device_type, dtype)`, the same as around the forward. In other
        modes the context manager does nothing.
        """
        return autocast_of(self._state)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Pass `is_last=False` to each backward inside the context, like the `no_sync` of DDP and of accelerate.

        The first backward after the context is the last one of its optimizer step, if it is not given `is_last`::

            with train.no_sync():
                train.backward(loss_of(first), divide=False)
            train.backward(loss_of(second), divide=False)
            report = train.step()
        """
        outer, self._is_in_no_sync = self._is_in_no_sync, True
        try:
            yield
        finally:
            self._is_in_no_sync = outer

    def zero_grad(self) -> None:
        """Discard the current optimizer step and all gradients of this model.

        Gradients that another model's backward left on this model are discarded too, and so is the optimizer step of
        another `TrainStep` of this model.

        Raises:
            StepError: an earlier backward or step raised.
        """
        self.micro_batches.refuse_after_failure("TrainStep.zero_grad")
        self.micro_batches.discard()
        self._forget()
        for callback in tuple(self.callbacks):
            callback.on_step_discarded()

    def backward(self, loss: torch.Tensor, *, is_last: bool | None = None, divide: bool = True) -> None:
        """Run the backward of one micro-batch.

        Args:
            loss: one element, of any floating-point dtype. It is scaled and divided in fp32.
            is_last: whether this is the last micro-batch of the optimizer step. With None, the config's
                `gradient_accumulation_steps` decides, and `step` is called after each backward. With True or False, the
                caller decides, and `step` is called after the last backward only. Do not mix None with True or False
                in one optimizer step. Inside `no_sync` None is False, and True is refused.
            divide: whether to divide the loss by the config's `gradient_accumulation_steps`. Pass False if the loss is
                already normalised over all micro-batches, or if their number differs from the config's.

        Raises:
            StepError: `step` or `update` was not called since the last backward, None and a bool are mixed for
                `is_last`, `loss` is not a tensor of one element, a trainable parameter is not stored in fp32, or an
                earlier backward or step raised. Also if there are gradients before the first backward of an optimizer
                step: call `zero_grad`. With `zeroamp.reproducible`, also if the number of micro-batches or the division
                of the losses would make the bits depend on the number of ranks.
            PeerError: the backend ended a collective, because it timed out or another rank's process ended.
        """
        self.micro_batches.refuse_after_failure("TrainStep.backward")
        is_last = self._is_last(is_last)
        if self.is_between_steps:
            self._begin()
        arithmetic = self.micro_batches.arithmetic
        arithmetic.refuse_count(is_last=is_last)
        refuse_loss(loss)
        divisor = arithmetic.loss_divisor(divide=divide, others=self._losses.are_divided)
        # In fp32: a float16 loss times its scale would overflow.
        scaled = self._scaler.scale_loss(loss.float() / divisor if divisor > 1 else loss.float())
        if self._state.issued is not None:
            self._state.issued.num_backwards += 1
        self._state.gradient_scale = self._scaler.scale * arithmetic.gradient_divisor(divide) if is_last else None
        with self.micro_batches.noting("backward"), self.callbacks.phase("backward"):
            self.micro_batches.backward(scaled, is_last=is_last)
        if loss.dtype in LOW_DTYPES and not self._has_warned:
            self._warn_of_low_loss(loss.dtype)
        self._losses.add(loss, is_divided=divide)
        self._is_stepped = False

    def reopen(self) -> None:
        """Continue an optimizer step whose last micro-batch has run: the next backward adds to its gradients.

        For loops that learn only after a backward whether it was the last one. Such a loop passes `is_last=True` to
        every backward, so every backward reduces its gradients. Nothing happens if the last micro-batch has not run.

        Raises:
            StepError: `clip_grad_norm` was called, `data_types.grad_accum_dtype` is not fp32, the config counts the
                micro-batches, an earlier backward or step raised, or with `zeroamp.reproducible` the order of additions
                depends on the number of micro-batches (stages 0 and 1, replicas).
        """
        self.micro_batches.refuse_after_failure("TrainStep.reopen")
        if not self.micro_batches.is_complete:
            return
        if self._pending is not None:
            raise StepError("TrainStep.reopen was called between clip_grad_norm() and update(). Call update() first.")
        if not self._is_ended_by_caller:
            raise StepError(
                "TrainStep.reopen was called, but the config counts micro-batches. Pass is_last to backward."
            )
        self.micro_batches.arithmetic.refuse_reopen()
        if self._policy.grad_accum_dtype != torch.float32:
            raise StepError(
                "TrainStep.reopen needs sums of micro-batches in fp32, but data_types.grad_accum_dtype is "
                f"{short_name(self._policy.grad_accum_dtype)}. Leave it out, or pass is_last=False to the backwards "
                "before the last one."
            )
        self.micro_batches.is_complete = False

    def _begin(self) -> None:
        """Check what the caller may have changed since the last optimizer step, and clear the sums of losses."""
        self.micro_batches.refuse_other_gradients()
        self.micro_batches.refuse_low_shards()
        self._losses.reset()  # another TrainStep's zero_grad does not reset them
        if self._num_held != (num_held := _num_held(self.optimizers)):
            refuse_foreign(self.optimizers, self.micro_batches.parameters)
            self._num_held = num_held

    def _warn_of_low_loss(self, dtype: torch.dtype) -> None:
        self._has_warned = True
        is_autocast = self._policy.mode == "autocast"  # some ops, such as a product of logits, are in bf16 under it
        how = "inside `with train.autocast():`, or, if it was there already, " if is_autocast else ""
        logger.warning(
            "TrainStep.backward got a loss in %s, which is rounded more than one in fp32. Compute it %sfrom "
            "logits.float().",
            *(short_name(dtype), how),
        )

    def _is_last(self, is_last: bool | None) -> bool:
        if self._pending is not None:
            raise StepError("TrainStep.backward was called between clip_grad_norm() and update(). Call update() first.")
        if self._is_in_no_sync and is_last:
            raise StepError("TrainStep.backward got is_last=True inside no_sync(). Run the last backward after it.")
        if self._is_in_no_sync:
            is_last = False
        elif self._was_in_no_sync and not self.is_between_steps and is_last is None:
            is_last = True
        self._was_in_no_sync = self._is_in_no_sync
        is_by_caller = is_last is not None
        if self.micro_batches.num_done > 0:
            if self._is_ended_by_caller != is_by_caller:
                raise StepError(
                    "TrainStep.backward got is_last for some micro-batches of an optimizer step, but not for all. Pass "
                    "it for each of them, or for none; no_sync() counts as is_last=False."
                )
            if self.micro_batches.is_complete or (not is_by_caller and not self._is_stepped):
                raise StepError(
                    "TrainStep.backward was called twice without step() in between. Call step() after each backward. "
                    "For several losses of one micro-batch call it once, with their sum: backward(loss + other_loss)."
                )
        self._is_ended_by_caller = is_by_caller
        if is_last is not None:
            return is_last
        return self.micro_batches.num_done + 1 == self._policy.gradient_accumulation_steps

    def step(self) -> StepReport | None:
        """End the optimizer step after its last micro-batch: run `clip_grad_norm()`, then `update()`.

        Returns:
            The report of the optimizer step. None before its last micro-batch, if the config counts micro-batches.

        Raises:
            StepError: no backward ran since the last call, the last backward was given `is_last=False`, no parameter
                has a gradient, a gradient overflowed at the minimum loss scale, the ranks made different calls or have
                different settings (on an accelerator, raised one step later), or an earlier backward or step raised.
            PeerError: the backend ended a collective, because it timed out or another rank's process ended.
            CheckpointError: a background save failed. The optimizer step was taken.
        """
        self.micro_batches.refuse_after_failure("TrainStep.step")
        if self._pending is None and self._is_stepped:
            raise StepError("TrainStep.step was called without a backward since the last step. Call backward first.")
        if not self.micro_batches.is_complete and not self._is_ended_by_caller:
            self._is_stepped = True
            return None
        if self._pending is None:
            self._refuse_incomplete("step")
        with self.callbacks.phase("optimizer"):
            pending = self._pending or self._clip(self._policy.gradient_clipping)
            report = self._update(pending, self.optimizers)
        return self._end(report)

    def clip_grad_norm(self, max_norm: float | None = None) -> torch.Tensor:
        """Clip the gradients of the optimizer step and return their norm before clipping. Call `update` next.

        Between `clip_grad_norm` and `update`, `parameter.grad` is the averaged, unscaled, clipped gradient, a sharded
        fp32 DTensor. In float16 this call detects overflows, and updates the loss scale.

        Args:
            max_norm: the largest 2-norm; 0 does not clip. With None, the config's `gradient_clipping` is used.

        Returns:
            0-D fp32, on the device: the true norm over all parameters and ranks, before clipping.

        Raises:
            StepError: the last micro-batch has not run, `clip_grad_norm` was called twice, `max_norm` is negative or
                NaN, no parameter has a gradient, a gradient overflowed at the minimum loss scale, the ranks made
                different calls or have different settings (on an accelerator, raised one step later), or an earlier
                backward or step raised.
            PeerError: the backend ended a collective, because it timed out or another rank's process ended.
        """
        self.micro_batches.refuse_after_failure("TrainStep.clip_grad_norm")
        limit = self._policy.gradient_clipping if max_norm is None else checked_max_norm(max_norm)
        self._refuse_incomplete("clip_grad_norm")
        with self.callbacks.phase("optimizer"):
            self._pending = self._clip(limit)
        return self._pending.norm

    def update(self, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> StepReport:
        """Update the parameters after `clip_grad_norm`, step the schedulers, and discard the gradients.

        If the step is skipped (see `StepReport.skipped`), neither parameters nor schedulers are updated.

        Args:
            optimizers: which of the optimizers step, with their schedulers. Gradients of the others are discarded, and
                their parameters stay as they are. None: all optimizers step.

        Raises:
            StepError: `clip_grad_norm` was not called before, an optimizer is not one of this TrainStep, or an earlier
                backward or step raised.
            CheckpointError: a background save failed. The optimizer step was taken.
        """
        pending, stepping = self._to_update("update", self.optimizers if optimizers is None else optimizers)
        with self.callbacks.phase("optimizer"):
            report = self._update(pending, stepping)
        return self._end(report)

    def update_part(self, optimizer: torch.optim.Optimizer) -> None:
        """Step one of several optimizers after `clip_grad_norm`, and leave the optimizer step open.

        For loops that step their optimizers one by one, with code in between. `update(others)` ends the optimizer step:
        it steps the optimizers that are left, and discards all gradients. `update([])` steps none. The scheduler of
        `optimizer` is not stepped.

        Raises:
            StepError: as `update`.
        """
        pending, stepping = self._to_update("update_part", [optimizer])
        with self.callbacks.phase("optimizer"), self.micro_batches.noting("optimizer.step"):
            self._step_optimizers(pending, stepping)

    def _to_update(
        self, method: str, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple["_PendingUpdate", Sequence[torch.optim.Optimizer]]:
        """Check a call of `method`. Return the result of `clip_grad_norm`, and the optimizers."""
        self.micro_batches.refuse_after_failure(f"TrainStep.{method}")
        if self._pending is None:
            raise StepError(f"TrainStep.{method} was called without clip_grad_norm(). Call it first, or step() alone.")
        for optimizer in optimizers:
            if not any(optimizer is own for own in self.optimizers):
                raise StepError(
                    f"TrainStep.{method} was given a {type(optimizer).__name__} that is not one of this TrainStep. "
                    "Pass those of TrainStep.optimizers."
                )
        return self._pending, optimizers

    def _end(self, report: StepReport) -> StepReport:
        with ExitStack() as calls:  # runs all of them, last pushed first, even if one raises
            calls.callback(call_observers, self._state.root)
            for callback in reversed(self.callbacks):
                calls.callback(callback.on_step_end, report)
        return report

    def _refuse_incomplete(self, method: str) -> None:
        if self._pending is not None:
            raise StepError(f"TrainStep.{method} was called twice in one optimizer step. Call update() after it.")
        if not self.micro_batches.is_complete:
            when = "without a backward" if self.is_between_steps else "before the last micro-batch of an optimizer step"
            raise StepError(
                f"TrainStep.{method} was called {when}. Call it after the backward that ends the step: the config's "
                "last, or the one with is_last=True."
            )

    def _clip(self, max_norm: float) -> "_PendingUpdate":
        """Compute the norm over all ranks, check for overflow, unscale and clip in one pass.

        Only in float16, and if steps that are not finite are skipped, the host waits for the norm.
        """
        if self._agreement is not None:
            done = (self.num_steps, self.num_skipped, self._losses.num_divided, self._is_ended_by_caller)
            self._agreement.done = Done(*done, max_norm, self._scaler.scale, self._state.root.training)
        divisor = self.micro_batches.arithmetic.gradient_divisor(self._losses.are_divided)
        scale = self._scaler.scale * divisor  # of the gradients
        try:
            with label("norm"):
                loss, norm = self._statistics.sum_over_ranks(self._losses.sums(), scale=scale)
            pending = _PendingUpdate(loss, norm.float(), self._scaler.scale)
            if self._scaler.enabled or self._policy.skip_nonfinite_steps or self._policy.check_grad_overflow:
                on_host = float(norm)
                pending.skipped = self._scaler.overflowed(on_host, self.num_steps) or not math.isfinite(on_host)
            if not pending.skipped and (max_norm > 0 or scale != 1.0):
                with label("clip"):
                    factor = clip_factor(pending.norm, max_norm) / scale
                    multiply_gradients(self.micro_batches.with_gradient(), factor)
                self._state.gradient_scale = 1.0
        except BaseException:  # after any error, the next backward begins a new optimizer step
            self._finish()
            raise
        return pending

    def _step_optimizers(self, pending: "_PendingUpdate", optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for callback in tuple(self.callbacks):
            callback.before_update()
        if optimizers and (self._pending is not None or self.callbacks):
            # A forward since clip_grad_norm, or one of a callback, may have left the old weights unsharded.
            reshard(self.micro_batches.units)
        if not pending.skipped:
            for update in self._updates:
                if any(update.optimizer is optimizer for optimizer in optimizers):
                    with label("optimizer", type(update.optimizer).__name__):
                        update.step()

    def _update(self, pending: "_PendingUpdate", optimizers: Sequence[torch.optim.Optimizer]) -> StepReport:
        try:
            with self.micro_batches.noting("optimizer.step"):
                rates = tuple(rate for optimizer in self.optimizers for rate in learning_rates(optimizer))
                self._step_optimizers(pending, optimizers)
                if not pending.skipped:
                    self.num_steps += 1
                    for own, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                        if scheduler is not None and any(own is optimizer for optimizer in optimizers):
                            scheduler.step()
            self.num_skipped += pending.skipped
            report = StepReport(
                step=self.num_steps,
                loss_tensor=pending.loss,
                grad_norm_tensor=pending.norm,
                loss_scale=pending.scale,
                skipped=pending.skipped,
                num_skipped=self.num_skipped,
                is_scale_exhausted=self._scaler.is_exhausted,
                lr_values=rates,
            )
            every = self._policy.steps_per_print
            if every and (self.num_steps + self.num_skipped) % every == 0:
                log_step(report, self.optimizers, self._state.axes.whole)
            return report
        finally:
            self._finish()

    def _finish(self) -> None:
        self.micro_batches.end()
        self._forget()

    def _forget(self) -> None:
        self._pending, self._is_ended_by_caller, self._is_stepped = None, None, True
        self._losses.reset()
        self._state.gradient_scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of steps and the loss scale, as plain numbers. Save optimizers and schedulers separately.

        Raises:
            StepError: called inside an optimizer step, whose gradients would be lost.
        """
        self.micro_batches.refuse_unfinished("TrainStep.state_dict")
        return {"num_steps": self.num_steps, "num_skipped": self.num_skipped, "loss_scale": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            StepError: called inside an optimizer step, or the state has another kind of loss scale than the config.
        """
        self.micro_batches.refuse_unfinished("TrainStep.load_state_dict")
        if "loss_scale" in state:
            self._scaler.load_state_dict(state["loss_scale"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]


def _num_held(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the number of parameters that the optimizers hold. `add_param_group` changes it."""
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


def _only(values: tuple[T, ...], name: str) -> T:
    if len(values) != 1:
        raise StepError(f"TrainStep.{name} was read, but there are {len(values)} of them. Read TrainStep.{name}s.")
    return values[0]


@dataclass(slots=True)
class _PendingUpdate:
    """The results of `clip_grad_norm` that `update` needs."""

    loss: torch.Tensor
    """0-D fp64: see `StepReport.loss_tensor`."""
    norm: torch.Tensor
    """0-D fp32: unscaled, before clipping."""
    scale: float
    """The loss scale of this step's losses."""
    skipped: bool = False
    """Whether a gradient is not finite, so that nothing is updated."""
