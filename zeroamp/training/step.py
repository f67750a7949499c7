"""`TrainStep`: runs the optimizer steps of a wrapped model, from the backwards of the micro-batches to the update."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from zeroamp.policies.errors import StepError
from zeroamp.policies.extensions import Extension, of_class
from zeroamp.training.callbacks import Callbacks
from zeroamp.training.refused_arguments import Scheduler, checked_max_norm
from zeroamp.training.step_driver import StepDriver
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import autocast_of

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
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        schedulers = scheduler if isinstance(scheduler, Sequence) else (scheduler,) * (scheduler is not None)
        self._driver = StepDriver(model, optimizers, tuple(schedulers) or (None,) * len(optimizers), on_shards)
        for extension in of_class(self._driver.state.extensions, StepExtension):
            extension.attach_step(self)
        for attach in tuple(on_new_train_step):
            attach(self)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers, in the order in which they step."""
        return self._driver.optimizers

    @property
    def schedulers(self) -> tuple[Scheduler | None, ...]:
        """One entry per optimizer: its scheduler, or None."""
        return self._driver.schedulers

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return self._driver.num_steps

    @property
    def num_skipped(self) -> int:
        """Optimizer steps skipped because a gradient was not finite."""
        return self._driver.num_skipped

    @property
    def loss_scale(self) -> float:
        """The factor by which the next `backward` multiplies its loss. 1 except in float16."""
        return self._driver.scaler.scale

    @property
    def callbacks(self) -> Callbacks:
        """The callbacks of this TrainStep, called in the order of the list. See `zeroamp.Callback`."""
        return self._driver.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: object) -> None:
        if callbacks is self._driver.callbacks:  # train.callbacks += [...]
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
        return autocast_of(self._driver.state)

    def no_sync(self) -> AbstractContextManager[None]:
        """Pass `is_last=False` to each backward inside the context, like the `no_sync` of DDP and of accelerate.

        The first backward after the context is the last one of its optimizer step, if it is not given `is_last`::

            with train.no_sync():
                train.backward(loss_of(first), divide=False)
            train.backward(loss_of(second), divide=False)
            report = train.step()
        """
        return self._driver.no_sync()

    def zero_grad(self) -> None:
        """Discard the current optimizer step and all gradients of this model.

        Gradients that another model's backward left on this model are discarded too, and so is the optimizer step of
        another `TrainStep` of this model.

        Raises:
            StepError: an earlier backward or step raised.
        """
        self._driver.discard()

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
        self._driver.backward(loss, is_last=is_last, divide=divide)

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
        return self._driver.step()

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
        self._driver.micro_batches.refuse_after_failure("TrainStep.clip_grad_norm")
        clipping = self._driver.state.plan.policy.gradient_clipping
        return self._driver.clip(clipping if max_norm is None else checked_max_norm(max_norm))

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
        return self._driver.update(optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of steps and the loss scale, as plain numbers. Save optimizers and schedulers separately.

        Raises:
            StepError: called inside an optimizer step, whose gradients would be lost.
        """
        self._driver.micro_batches.refuse_unfinished("TrainStep.state_dict")
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "loss_scale": self._driver.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            StepError: called inside an optimizer step, or the state has another kind of loss scale than the config.
        """
        self._driver.micro_batches.refuse_unfinished("TrainStep.load_state_dict")
        if "loss_scale" in state:
            self._driver.scaler.load_state_dict(state["loss_scale"])
        self._driver.num_steps, self._driver.num_skipped = state["num_steps"], state["num_skipped"]
        self._driver.scheduler_steps.forget()


def driver_of(train: TrainStep) -> StepDriver:
    """Return what runs the steps of a `TrainStep`. Integrations and extensions need more than its methods."""
    return train._driver
