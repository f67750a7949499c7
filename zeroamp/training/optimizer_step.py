"""`Step`: the optimizer steps of a wrapped model, by `backward`, `reduce`, `apply` and `end`.

`TrainStep` and the loops of the integrations call these. An optimizer step goes through the phases of `StepState`:

    IDLE -- backward --> OPEN -- last backward --> COMPLETE -- reduce --> REDUCED -- apply of each, end --> IDLE

A backward in the phase COMPLETE continues the optimizer step. `discard` leads back to IDLE from every phase, and an
error of a backward or step to FAILED.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import (
    discard_unsharded_gradients,
    end_failed_backward,
    set_accumulation_dtype,
)
from zeroamp.hooks._torch.parameter_group import release_groups
from zeroamp.hooks.collectives.collective_calls import peer_lost
from zeroamp.hooks.group_gradients import end_backward, refuse_lost_gradients
from zeroamp.hooks.guards import BackwardGuard
from zeroamp.hooks.observers.trace_labels import label
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import StepError, describe
from zeroamp.policies.extensions import Extension, of_class
from zeroamp.training.all_reduce import StepAllReduce
from zeroamp.training.arithmetic import StepArithmetic
from zeroamp.training.callbacks import Callbacks
from zeroamp.training.gradients import Gradients
from zeroamp.training.loss_scaler import LossScaler
from zeroamp.training.norm_and_clip import clip_factor, multiply_gradients
from zeroamp.training.rank_agreement import Done, RankAgreement
from zeroamp.training.refused_arguments import refuse_foreign, refuse_set_by_caller
from zeroamp.training.update import OptimizerUpdate
from zeroamp.wrapping.state import WrapState
from zeroamp.wrapping.step_state import Reduced, StepPhase

logger = logging.getLogger("zeroamp")

Where = Literal["backward", "step", "optimizer.step"]


class ArithmeticExtension(Extension):
    """What one config key changes in the arithmetic of optimizer steps."""

    def attach_arithmetic(self, step: "Step") -> None:
        """Replace how losses and gradients are divided and added. Called for a `TrainStep` and an observed step."""


class Step:
    """Runs the optimizer steps of a wrapped model, one after the other. `WrapState.step` has the current one."""

    def __init__(self, state: WrapState) -> None:
        """Take a wrapped model. `attach` adds its optimizers, which `reduce` and `apply` need."""
        self.state = state
        self.current = state.step
        """The current optimizer step of the model, which all `Step`s of it share."""
        self.units = [module for module in state.root.modules() if isinstance(module, FSDPModule)]
        # The root, not the model: `torch.compile` may have wrapped the model in another module.
        self._root = cast(FSDPModule, state.root)
        self._model_wide = [state.holders[group.name] for group in state.plan.groups if group.kind == "model-wide"]
        self._groups = [each.group for each in state.gradients]
        release_groups(self._groups)
        self.gradients = Gradients(state)
        self.arithmetic = StepArithmetic(state, self.gradients)
        """How losses and gradients are divided and added."""
        for extension in of_class(state.extensions, ArithmeticExtension):
            extension.attach_arithmetic(self)
        self._policy = state.plan.policy
        self._stage = self._policy.stage
        self.scaler = LossScaler(self._policy.loss_scale, enabled=self._policy.low_dtype == torch.float16)
        self.callbacks = Callbacks(state.callbacks)
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Optimizer steps skipped because a gradient was not finite."""
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.updates: tuple[OptimizerUpdate, ...] = ()
        """One per optimizer."""
        self._num_held = 0
        self._agreement: RankAgreement | None = None
        self.all_reduce = StepAllReduce(state, self.gradients, self.arithmetic, self.callbacks)
        self._has_warned = False  # about a loss in low precision

    def attach(self, optimizers: Sequence[torch.optim.Optimizer], on_shards: Sequence[bool]) -> None:
        """Add optimizers, which are checked. `on_shards`: one value per optimizer, see `TrainStep`."""
        self.optimizers, self._num_held = tuple(optimizers), _num_held(optimizers)
        self.updates = tuple(
            OptimizerUpdate(optimizer, self.state, on_shards=each)
            for optimizer, each in zip(optimizers, on_shards, strict=True)
        )
        if self.state.axes.whole.size() > 1 and dist.get_backend(self.state.world) != "fake":  # which sums nothing
            self._agreement = self.all_reduce.agreement = RankAgreement(self.state, self.optimizers)

    @property
    def phase(self) -> StepPhase:
        """The phase of this object's optimizer step. IDLE during a step of another `TrainStep` of the model."""
        owner = self.current.owner
        return self.current.phase if owner is None or owner is self else StepPhase.IDLE

    @property
    def is_between_steps(self) -> bool:
        """Whether the optimizer step has not run a backward yet, or a failure has ended it."""
        return self.phase in (StepPhase.IDLE, StepPhase.FAILED)

    @property
    def is_complete(self) -> bool:
        """Whether the last backward of this object's optimizer step has run."""
        return self.phase in (StepPhase.COMPLETE, StepPhase.REDUCED)

    # The four calls

    def backward(self, loss: torch.Tensor, *, last: bool, divide: bool = True) -> None:
        """Run the backward of one micro-batch. The first one begins an optimizer step.

        Args:
            loss: see `TrainStep.backward`.
            last: whether it is the last one of the optimizer step. Loops that learn this only after a backward pass
                True to each: every backward then reduces its gradients, and is added to the earlier ones.
            divide: see `TrainStep.backward`.

        Raises:
            StepError: see `TrainStep.backward`. Also in the phase COMPLETE, if `data_types.grad_accum_dtype` is not
                fp32.
        """
        self.current.refuse_after_failure("TrainStep.backward")
        if self.state.set_by_caller:
            refuse_set_by_caller(self.state)
        phase = self.phase
        if phase is StepPhase.IDLE:
            self._refuse_changes()
        elif phase is StepPhase.COMPLETE:
            self._refuse_low_sums()
        self.gradients.refuse_lost()
        _refuse_loss(loss)
        current, arithmetic = self.current, self.arithmetic
        divisor = arithmetic.loss_divisor(divide=divide, others=current.are_divided)
        # In fp32: a float16 loss times its scale would overflow.
        scaled = loss.float() / divisor if divisor > 1 else loss.float()
        if self.scaler.enabled:
            scaled = self.scaler.scale_loss(scaled)
        if self._agreement is not None:
            self._agreement.issued.num_backwards += 1
        with self.noting("backward"), self.callbacks.phase("backward"):
            self.run_backward(scaled, last=last)
        if loss.dtype in LOW_DTYPES and not self._has_warned:
            self._warn_of_low_loss(loss.dtype)
        current.add_loss(loss, is_divided=divide, retains_each=arithmetic.retains_losses)
        current.gradient_scale = self.scaler.scale * arithmetic.gradient_divisor(divide)
        current.is_counted, current.is_stepped, current.was_in_no_sync = False, False, False

    def reduce(self, max_norm: float = 0.0) -> Reduced:
        """Run the step's all-reduce, check for overflow, unscale and clip in one pass.

        A second call returns the same results.

        Only in float16, and if steps that are not finite are skipped, the host waits for the norm.

        Args:
            max_norm: the largest norm of the gradients. 0: they are not clipped.

        Raises:
            StepError: see `TrainStep.clip_grad_norm`.
        """
        current = self.current
        if current.reduced is not None:
            return current.reduced
        if self._agreement is not None:
            done = (self.num_steps, self.num_skipped, current.num_divided, not current.is_counted)
            self._agreement.done = Done(*done, max_norm, self.scaler.scale, self.state.root.training)
        scale = current.gradient_scale
        try:
            with label("norm"):
                with self.noting("step"):
                    self.finish()
                    own = self.all_reduce.own_numbers(current.loss_sums())
                loss, norm = self.all_reduce.run(own, scale=scale)
            reduced = Reduced(loss, norm.float(), self.scaler.scale)
            if self.scaler.enabled or self._policy.skip_nonfinite_steps or self._policy.check_grad_overflow:
                on_host = float(norm)
                reduced.skipped = self.scaler.overflowed(on_host, self.num_steps) or not math.isfinite(on_host)
            if not reduced.skipped and (max_norm > 0 or scale != 1.0):
                with label("clip"):
                    multiply_gradients(self.gradients.present(), clip_factor(reduced.norm, max_norm) / scale)
                current.gradient_scale = 1.0
        except BaseException:  # after any error, the next backward begins a new optimizer step
            self.end()
            raise
        current.reduced, current.phase = reduced, StepPhase.REDUCED
        return reduced

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Step one of the optimizers after `reduce`, unless the optimizer step is skipped. It stays open."""
        reduced, current = self.current.reduced, self.current
        if reduced is None:
            raise AssertionError("expected the results of reduce")
        with self.noting("optimizer.step"):
            if not current.is_applied:
                for callback in self.callbacks.all():
                    callback.before_update()
            # A forward since the backward, or one of a callback, may have left the old weights unsharded.
            release_groups(self._groups)
            current.is_applied = True
            current.done.append(optimizer)
            if not reduced.skipped:
                update = next(each for each in self.updates if each.optimizer is optimizer)
                with label("optimizer", type(optimizer).__name__):
                    update.step()

    def end(self) -> None:
        """End the optimizer step: discard its gradients, so that the next backward begins another one."""
        if self.current.shard_accumulator is not None:
            self.current.shard_accumulator.drop()
        self.gradients.release()
        self.current.reset()

    # The backward of a micro-batch

    def run_backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run a backward with the flags of the ZeRO stage. `loss` is already scaled and divided."""
        if self.state.root_forward.depth:
            self.state.root_forward.reset()  # a KeyboardInterrupt may have ended a forward midway
        is_first = self.current.num_micro_batches == 0
        if is_first:
            self.current.owner = self
            self._set_accumulation(torch.float32 if last else self._policy.grad_accum_dtype)
        accumulator = self.current.shard_accumulator
        if accumulator is not None and is_first and last:
            accumulator.forget()  # one micro-batch: nothing to sum, so the gradient is not rounded
        elif accumulator is not None:
            accumulator.watch(list(self.gradients.averaged))
        self.arithmetic.before_backward()
        self._set_flags(last=last)
        BackwardGuard.armed = True
        try:
            with label("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
                if last:
                    refuse_lost_gradients(self.state.gradients, "TrainStep.backward")
                end_backward(self.state.gradients)
                if accumulator is not None:
                    accumulator.end_backward()
        except RuntimeError as error:
            raise peer_lost(error, None, self.state.listeners) from error
        finally:
            BackwardGuard.armed = False
            self.arithmetic.end_micro_batch()
        self.current.num_micro_batches += 1
        self.current.phase = StepPhase.COMPLETE if last else StepPhase.OPEN
        if not last:
            self.gradients.note()

    def _set_accumulation(self, dtype: torch.dtype) -> None:
        """Sum unsharded gradients in `dtype` in this optimizer step, which may have another number of micro-batches."""
        if self._stage >= 2 or dtype == self.current.accumulates_in:
            return
        if not all(set_accumulation_dtype(unit, dtype) for unit in self.units):
            raise StepError(
                "gradient_accumulation_steps must equal the number of micro-batches (or both be more than one) where "
                f"data_types.grad_accum_dtype is {short_name(self._policy.grad_accum_dtype)}, at stages 0 "
                f"and 1 on torch {torch.__version__}. Set it, or leave grad_accum_dtype out."
            )
        self.current.accumulates_in = dtype

    def _set_flags(self, *, last: bool) -> None:
        """Set FSDP2's flags for the backward of one micro-batch, by its place in the optimizer step.

        Stages 0 and 1 reduce once per optimizer step. With HSDP, stages 2 and 3 sum the micro-batches of each replica,
        and then sum over replicas once. Stages 0 to 2 leave parameters unsharded until the end of the
        optimizer step. Stage 3 does so for the model-wide group only, because the next forward unshards that group
        first. docs/precision.md has the table.
        """
        # The methods of the class: those that `wrap_model` sets on a unit are for callers.
        FSDPModule.set_is_last_backward(self._root, last)
        for unit in self.units:  # FSDP2's recursive setters would walk through all modules twice
            FSDPModule.set_requires_gradient_sync(unit, last or self._stage >= 2, recurse=False)
            FSDPModule.set_reshard_after_backward(unit, last or self._stage == 3, recurse=False)
        for switch in self.state.replica_switches:
            switch(last)
        for holder in self._model_wide:
            FSDPModule.set_reshard_after_backward(holder, last, recurse=False)

    # The gradients

    def finish(self) -> None:
        """Reshard the parameters, and set their gradients of the optimizer step as sharded fp32 DTensors."""
        release_groups(self._groups)  # an evaluation since the backward may have left groups unsharded
        if self.current.shard_accumulator is not None:
            self.current.shard_accumulator.flush()

    def abandon(self) -> None:
        """Discard the current optimizer step at any point, with all sharded and unsharded gradients of the model."""
        if self.current.owner not in (None, self):
            self.current.owner.abandon()
        self.state.root_forward.reset()
        self.arithmetic.end_micro_batch()
        if self.current.is_open:
            discard_unsharded_gradients(self.units)
            release_groups(self._groups)
        self._set_flags(last=True)
        self.end()

    def discard(self) -> None:
        """Discard the current optimizer step and all gradients of the model. See `TrainStep.zero_grad`."""
        self.current.refuse_after_failure("TrainStep.zero_grad")
        self.abandon()
        for callback in self.callbacks.all():
            callback.on_step_discarded()

    def recover(self) -> None:
        """Make steps possible after a failed one, at whatever point, whose parameters and state were loaded again."""
        self.current.failure, self.current.phase = None, StepPhase.OPEN
        self._set_flags(last=True)
        end_failed_backward(self._root)
        self.discard()

    def _refuse_changes(self) -> None:
        """Check what the caller may have changed since the last optimizer step."""
        self.gradients.refuse_other(self)
        self.gradients.refuse_low_shards()
        if self._num_held != (num_held := _num_held(self.optimizers)):
            refuse_foreign(self.optimizers, self.gradients.parameters)
            self._num_held = num_held

    def _refuse_low_sums(self) -> None:
        """Raise StepError if a backward after the last one would be added to gradients that were rounded."""
        if (dtype := self._policy.grad_accum_dtype) != torch.float32:
            raise StepError(
                "A backward after the last one of an optimizer step needs sums of micro-batches in fp32, but "
                f"data_types.grad_accum_dtype is {short_name(dtype)}. Leave it out, or mark the backwards before the "
                "last one."
            )

    @contextmanager
    def noting(self, where: Where) -> Iterator[None]:
        """Record an exception that is raised inside the context, and re-raise it."""
        try:
            yield
        except BaseException as error:
            self.arithmetic.end_micro_batch()
            self.current.fail(f"{where} ({type(error).__name__}: {error})")
            raise

    def _warn_of_low_loss(self, dtype: torch.dtype) -> None:
        self._has_warned = True
        is_autocast = self._policy.mode == "autocast"  # some ops, such as a product of logits, are in bf16 under it
        how = "inside `with train.autocast():`, or, if it was there already, " if is_autocast else ""
        logger.warning(
            "TrainStep.backward got a loss in %s, which is rounded more than one in fp32. Compute it %sfrom "
            "logits.float().",
            *(short_name(dtype), how),
        )


def _num_held(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the number of parameters that the optimizers hold. `add_param_group` changes it."""
    return sum([len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups])


def _refuse_loss(loss: object) -> None:
    """Raise StepError unless the loss is a plain tensor of one element that requires a gradient.

    A loss that is a DTensor was computed from a sharded parameter. Autograd cannot mix it with plain tensors.
    """
    where = "The loss given to TrainStep.backward"
    if not isinstance(loss, torch.Tensor):
        raise StepError(describe(where, f"a {type(loss).__name__}", "a tensor", "Pass output.loss."))
    if isinstance(loss, DTensor):
        raise StepError(
            f"{where} is a DTensor: it was computed from a sharded parameter, which was read outside of the model's "
            "forward, as in loss + model.embed.weight.pow(2).sum(). Compute that term in the model's forward, or in a "
            'method given to zeroamp.register_forward_method. For an embedding or a head, "zeroamp": '
            '{"own_units": false} lets its weight stay unsharded until the backward.'
        )
    if loss.numel() != 1:
        raise StepError(describe(where, f"a tensor of shape {tuple(loss.shape)}", "a scalar", "Reduce it."))
    if not loss.requires_grad:
        raise StepError(
            f"{where} ({loss.dtype}) needs no gradient. It must depend on trainable parameters of the wrapped model: "
            "compute it with gradients on, and do not detach it."
        )
