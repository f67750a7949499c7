"""`TrainStep`: runs the optimizer steps of a wrapped model, from the backwards of the micro-batches to the update."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zeroamp.planning.mesh import device_of, is_first_rank
from zeroamp.policies.errors import StepError
from zeroamp.policies.extensions import Extension, of_class
from zeroamp.training.callbacks import Callbacks
from zeroamp.training.optimizer_checks import checked_on_shards, refuse_unsupported, shard_loaded_state
from zeroamp.training.optimizer_step import Step
from zeroamp.training.rank_agreement import description_of
from zeroamp.training.refused_arguments import (
    Scheduler,
    checked_max_norm,
    checked_optimizers,
    checked_schedulers,
    refuse_different_factors,
    refuse_unusable,
)
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.run_alike import Description, run_alike
from zeroamp.wrapping.state import WrapState, autocast_of, refuse_part, wrap_state
from zeroamp.wrapping.step_state import StepPhase

logger = logging.getLogger("zeroamp")

on_new_train_step: "list[Callable[[TrainStep], None]]" = []
"""Called with each `TrainStep` at the end of its constructor. For a profiler that starts before the model is built."""


class StepExtension(Extension):
    """What one config key adds to a `TrainStep`."""

    def attach_step(self, train: "TrainStep") -> None:
        """Change a `TrainStep`, or append callbacks to it. Called at the end of its constructor."""


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
        """
        self.model = model
        self.optimizers = checked_optimizers(optimizer)
        """All optimizers, in the order in which they step."""
        schedulers = checked_schedulers(scheduler)
        self.schedulers = tuple(schedulers) or (None,) * len(self.optimizers)
        """One entry per optimizer: its scheduler, or None."""
        self._on_shards = checked_on_shards(on_shards, len(self.optimizers))
        self._step = self._step_of(wrap_state(model))
        self._policy = self._step.state.plan.policy
        self._scheduler_steps = _SchedulerSteps()
        self._is_in_no_sync = False
        self._has_warned = False  # of another number of micro-batches
        run_alike(
            self._checked,
            what="TrainStep",
            remedy="Pass the same optimizers and schedulers on all ranks.",
            error_type=StepError,
            group=self._step.state.world,
            device=device_of(self._step.state.mesh),
        )
        self._step.attach(self.optimizers, self._on_shards)
        for extension in of_class(self._step.state.extensions, StepExtension):
            extension.attach_step(self)
        for attach in tuple(on_new_train_step):
            attach(self)

    def _step_of(self, state: WrapState) -> Step:
        refuse_part(state, "TrainStep", "Build zeroamp.PipelineStep(parts, optimizer).")
        return Step(state)

    def _checked(self) -> tuple[None, Description]:
        """Check the arguments on this rank, and return them as text."""
        state = self._step.state
        self._step.gradients.refuse_low_shards()
        refuse_different_factors(state.root)
        refuse_unusable(self.optimizers, self.schedulers, state.root, self._step.gradients.parameters)
        for optimizer, on_shards in zip(self.optimizers, self._on_shards, strict=True):
            refuse_unsupported(optimizer, on_shards=on_shards)
            shard_loaded_state(optimizer, state.root)
            if not state.axes.is_plain:
                from zeroamp.meshes.tensor_parallel_replicas import refuse_on_two_axes

                refuse_on_two_axes(optimizer, on_shards=on_shards)
            for extension in state.extensions:
                extension.check_optimizer(optimizer, on_shards=on_shards)
        return None, description_of(state.root, self.optimizers, self.schedulers, self._on_shards)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return self._step.num_steps

    @property
    def num_skipped(self) -> int:
        """Optimizer steps skipped because a gradient was not finite."""
        return self._step.num_skipped

    @property
    def loss_scale(self) -> float:
        """The factor by which the next `backward` multiplies its loss. 1 except in float16."""
        return self._step.scaler.scale

    @property
    def callbacks(self) -> Callbacks:
        """The callbacks of this TrainStep, called in the order of the list. See `zeroamp.Callback`."""
        return self._step.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: object) -> None:
        if callbacks is self._step.callbacks:  # train.callbacks += [...]
            return
        raise StepError(
            "TrainStep.callbacks was set, which would remove the callbacks of zeroamp (reports, saving). "
            "Call train.callbacks.append(callback) for each of yours."
        )

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast of the config, for a loss that is computed outside of the model's forward.

        With `torch_autocast` this is `torch.autocast(device_type, dtype)`, the same as around the forward. In other
        modes the context manager does nothing.
        """
        return autocast_of(self._step.state)

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
        self._step.discard()

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
        is_counted, current = is_last is None and not self._is_in_no_sync, self._step.current
        if is_last and divide and not self._has_warned:
            self._warn_of_other_number()
        self._step.backward(loss, last=self._is_last(is_last), divide=divide)
        current.is_counted, current.was_in_no_sync = is_counted, self._is_in_no_sync

    def _warn_of_other_number(self) -> None:
        """Warn if the last backward of an optimizer step makes its losses no mean over its micro-batches."""
        number = 1 if self._step.is_between_steps else self._step.current.num_micro_batches + 1
        if number == (divisor := self._policy.gradient_accumulation_steps) or divisor == 1:
            return
        self._has_warned = True
        if is_first_rank(self._step.state.axes.whole):
            logger.warning(
                "TrainStep.backward divided the losses of an optimizer step of %d micro-batch%s by "
                "gradient_accumulation_steps, %d. For their mean, divide each loss yourself and pass divide=False. "
                "This is logged once.",
                *(number, "" if number == 1 else "es", divisor),
            )

    def _is_last(self, is_last: bool | None) -> bool:
        """Return whether a backward is the last of its optimizer step. Raise StepError if it contradicts the others."""
        phase, current = self._step.phase, self._step.current
        is_first = phase in (StepPhase.IDLE, StepPhase.FAILED)
        if phase is StepPhase.REDUCED:
            raise StepError("TrainStep.backward was called between clip_grad_norm() and update(). Call update() first.")
        if self._is_in_no_sync and is_last:
            raise StepError("TrainStep.backward got is_last=True inside no_sync(). Run the last backward after it.")
        if self._is_in_no_sync:
            is_last = False
        elif is_last is None and not is_first and current.was_in_no_sync:
            is_last = True
        if not is_first:
            if current.is_counted != (is_last is None):
                raise StepError(
                    "TrainStep.backward got is_last for some micro-batches of an optimizer step, but not for all. Pass "
                    "it for each of them, or for none; no_sync() counts as is_last=False."
                )
            if phase is StepPhase.COMPLETE or (is_last is None and not current.is_stepped):
                raise StepError(
                    "TrainStep.backward was called twice without step() in between. Call step() after each backward. "
                    "For several losses of one micro-batch call it once, with their sum: backward(loss + other_loss)."
                )
        if is_last is not None:
            return is_last
        return (0 if is_first else current.num_micro_batches) + 1 == self._policy.gradient_accumulation_steps

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
        step, current = self._step, self._step.current
        current.refuse_after_failure("TrainStep.step")
        phase = step.phase
        if phase is not StepPhase.REDUCED and (phase in (StepPhase.IDLE, StepPhase.FAILED) or current.is_stepped):
            raise self._without_backward()
        if phase is StepPhase.OPEN and current.is_counted:
            current.is_stepped = True
            return None
        if phase is StepPhase.OPEN:
            self._refuse_incomplete("step")
        with step.callbacks.phase("optimizer"):
            step.reduce(self._policy.gradient_clipping)
            report = self._update(self.optimizers)
        return self._ended(report)

    def _without_backward(self) -> StepError:
        """Return the error for a `step` that no backward of this object precedes."""
        if self._step.phase is StepPhase.IDLE and self._step.gradients.present():
            return StepError(
                "TrainStep.step was called without its backward, but the model has gradients: loss.backward() or "
                "a loss of another model left them. Call train.backward(loss). If one loss trains several models, "
                "wrap them as one module, such as both = wrap_model(nn.Sequential(a, b), config), and pass all "
                "optimizers to one TrainStep(both, [optimizer_a, optimizer_b])."
            )
        return StepError("TrainStep.step was called without a backward since the last step. Call backward first.")

    def _refuse_incomplete(self, method: str) -> None:
        step = self._step
        if step.phase is StepPhase.REDUCED:
            raise StepError(f"TrainStep.{method} was called twice in one optimizer step. Call update() after it.")
        if not step.is_complete:
            when = "without a backward" if step.is_between_steps else "before the last micro-batch of an optimizer step"
            raise StepError(
                f"TrainStep.{method} was called {when}. Call it after the backward that ends the step: the config's "
                "last, or the one with is_last=True."
            )

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
        self._step.current.refuse_after_failure("TrainStep.clip_grad_norm")
        limit = self._policy.gradient_clipping if max_norm is None else checked_max_norm(max_norm)
        self._refuse_incomplete("clip_grad_norm")
        with self._step.callbacks.phase("optimizer"):
            return self._step.reduce(limit).norm

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
        optimizers = self.optimizers if optimizers is None else optimizers
        self._step.current.refuse_after_failure("TrainStep.update")
        if self._step.phase is not StepPhase.REDUCED:
            raise StepError("TrainStep.update was called without clip_grad_norm(). Call it first, or step() alone.")
        for optimizer in optimizers:
            if not any(optimizer is own for own in self.optimizers):
                raise StepError(
                    f"TrainStep.update was given a {type(optimizer).__name__} that is not one of this TrainStep. "
                    "Pass those of TrainStep.optimizers."
                )
        with self._step.callbacks.phase("optimizer"):
            report = self._update(optimizers)
        return self._ended(report)

    def _update(self, optimizers: Sequence[torch.optim.Optimizer]) -> StepReport:
        """Apply these optimizers, step their schedulers, and end the optimizer step."""
        step = self._step
        reduced = step.reduce()
        try:
            self._scheduler_steps.check()
            rates = _learning_rates(self.optimizers)
            chosen = [index for index, own in enumerate(self.optimizers) if any(own is each for each in optimizers)]
            for index in chosen:
                step.apply(self.optimizers[index])
            step.num_steps += not reduced.skipped
            step.num_skipped += reduced.skipped
            with step.noting("optimizer.step"):
                for index in () if reduced.skipped else chosen:
                    if (scheduler := self.schedulers[index]) is not None:
                        self._scheduler_steps.step(index, scheduler)
        finally:
            step.end()
        report = StepReport(
            step=step.num_steps,
            loss_tensor=reduced.loss,
            grad_norm_tensor=reduced.norm,
            loss_scale=reduced.scale,
            skipped=reduced.skipped,
            num_skipped=step.num_skipped,
            lr_values=rates,
        )
        every = self._policy.steps_per_print
        if every and (step.num_steps + step.num_skipped) % every == 0 and is_first_rank(step.state.axes.whole):
            logger.info("%s", report)  # waits for the device
        return report

    def _ended(self, report: StepReport) -> StepReport:
        with ExitStack() as calls:  # runs all of them, last pushed first, even if one raises
            for callback in reversed(self.callbacks.all()):
                calls.callback(callback.on_step_end, report)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of steps and the loss scale, as plain numbers. Save optimizers and schedulers separately.

        Raises:
            StepError: called inside an optimizer step, whose gradients would be lost.
        """
        self._step.current.refuse_unfinished("TrainStep.state_dict")
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "loss_scale": self._step.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            StepError: called inside an optimizer step, or the state has another kind of loss scale than the config.
        """
        self._step.current.refuse_unfinished("TrainStep.load_state_dict")
        if "loss_scale" in state:
            self._step.scaler.load_state_dict(state["loss_scale"])
        self._step.num_steps, self._step.num_skipped = state["num_steps"], state["num_skipped"]
        self._scheduler_steps.forget()


class _SchedulerSteps:
    """Steps the schedulers of a `TrainStep`, and raises if the loop steps one of them too."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[Scheduler, object]] = {}  # position -> scheduler, its `last_epoch` after our step

    def step(self, position: int, scheduler: Scheduler) -> None:
        """Step the scheduler at a position of `TrainStep.schedulers`."""
        scheduler.step()
        self._left[position] = scheduler, getattr(scheduler, "last_epoch", None)

    def check(self) -> None:
        """Raise StepError if a scheduler has moved on since `step`. Schedulers without `last_epoch` are not checked."""
        for scheduler, left in self._left.values():
            now = getattr(scheduler, "last_epoch", None)
            if isinstance(now, int) and isinstance(left, int) and now > left:
                self.forget()  # the next optimizer step is not refused for the same call
                raise StepError(
                    f"{type(scheduler).__name__}.step was called by the loop, but TrainStep steps this scheduler after "
                    f"each update: last_epoch is {now}, and TrainStep left it at {left}. Remove the call, or do not "
                    "pass the scheduler to TrainStep. If scheduler.load_state_dict was called, also call "
                    "train.load_state_dict."
                )

    def forget(self) -> None:
        """Accept the present state of all schedulers, because it was loaded."""
        self._left.clear()


def _learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[float | torch.Tensor, ...]:
    """Return the learning rate of each param group. Tensors are copied, because a scheduler changes them in place."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    return tuple([rate.detach().clone() if isinstance(rate, torch.Tensor) else rate for rate in rates])


def step_of(train: TrainStep) -> Step:
    """Return what runs the steps of a `TrainStep`. Integrations and extensions need more than its methods."""
    return train._step
