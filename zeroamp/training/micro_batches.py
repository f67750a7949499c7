"""`MicroBatches`: runs the micro-batches of an optimizer step, from the first backward to gradients on the shards.

The `StepDriver` of a `TrainStep` and the observed step of `Ledger.verify` both use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import (
    discard_unsharded_gradients,
    end_failed_backward,
    set_accumulation_dtype,
)
from zeroamp.hooks.collectives.collective_calls import peer_lost
from zeroamp.hooks.group_gradients import refuse_lost_gradients
from zeroamp.hooks.guards import BackwardGuard
from zeroamp.hooks.observers.trace_labels import label
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import StepError
from zeroamp.policies.extensions import Extension, of_class
from zeroamp.training.arithmetic import StepArithmetic
from zeroamp.training.loop_mistakes import EarlierGradients
from zeroamp.training.scalar_parameters import ReplicatedGradients
from zeroamp.wrapping.state import WrapState, reshard
from zeroamp.wrapping.step_state import Phase

Where = Literal["backward", "step", "optimizer.step"]


class MicroBatchesExtension(Extension):
    """What one config key changes in the backwards of an optimizer step."""

    def attach_micro_batches(self, micro_batches: "MicroBatches") -> None:
        """Change how the micro-batches of optimizer steps run. Called for a `TrainStep` and for an observed step."""


class MicroBatches:
    """Runs the backwards of an optimizer step with the flags of the ZeRO stage. `WrapState.step` counts them."""

    def __init__(self, state: WrapState) -> None:
        self.units = [module for module in state.root.modules() if isinstance(module, FSDPModule)]
        self._state = state
        self._step = state.step
        # The root, not the model: `torch.compile` may have wrapped the model in another module.
        self._root = cast(FSDPModule, state.root)
        reshard(self.units)
        named = dict(state.root.named_parameters())
        self._fqns = list(named)
        self.parameters = list(named.values())
        """The sharded parameters. `model.parameters()` yields unsharded ones while a group is unsharded."""
        ignored = state.plan.ignored_fqns
        self.ignored = frozenset(parameter for fqn, parameter in named.items() if fqn in ignored)
        """The parameters of `wrap_model(ignored_params=...)`. `parameters` contains them too."""
        self._averaged = {fqn: p for fqn, p in named.items() if p not in self.ignored} if self.ignored else named
        self.averaged = self._averaged.values()
        """The parameters without the ignored ones."""
        self.replicated = ReplicatedGradients(self.averaged)
        self._earlier = EarlierGradients()
        self.arithmetic = StepArithmetic(state, self)
        """How losses and gradients are divided and added."""
        for extension in of_class(state.extensions, MicroBatchesExtension):
            extension.attach_micro_batches(self)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Run the backward of one micro-batch. `loss` is already scaled and divided."""
        self._state.root_forward.reset()  # a KeyboardInterrupt may have ended a forward midway
        is_first = self._step.num_micro_batches == 0
        if is_first:
            self._step.owner = self
            self._set_accumulation(torch.float32 if is_last else self._state.plan.policy.grad_accum_dtype)
        accumulator = self._step.shard_accumulator
        if accumulator is not None and is_first and is_last:
            accumulator.forget()  # one micro-batch: nothing to sum, so the gradient is not rounded
        elif accumulator is not None:
            accumulator.watch(list(self._averaged.values()))
        self.arithmetic.before_backward()
        self._set_flags(is_last=is_last)
        try:
            with BackwardGuard.let_pass(), label("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
                if is_last:
                    refuse_lost_gradients(self._state.gradients, "TrainStep.backward")
                for group in self._state.gradients:
                    group.end_backward()
                if accumulator is not None:
                    accumulator.end_backward()
        except RuntimeError as error:
            raise peer_lost(error, None, self._state.listeners) from error
        finally:
            self.arithmetic.end_micro_batch()
        self._step.num_micro_batches += 1
        self._step.phase = Phase.REDUCED if is_last else Phase.OPEN
        if not is_last:
            self.note_gradients(are_reduced=self._state.plan.policy.stage >= 2)

    def note_gradients(self, *, are_reduced: bool) -> None:
        """Note the gradients that the next micro-batch adds to. `are_reduced`: whether they are on the shards."""
        leaves = (leaf for group in self._state.gradients for leaf in group.leaves)
        self._earlier.note(self.parameters if are_reduced else list(leaves))

    def refuse_lost_gradients(self) -> None:
        """Raise StepError if the gradients that `note_gradients` has noted are gone."""
        self._earlier.check()

    def refuse_other_gradients(self) -> None:
        """Raise StepError if there are gradients that the first backward of an optimizer step would add to.

        Does not wait for the device: only whether `grad` is None is read.
        """
        if self._step.is_open and self._step.owner is not self:
            raise StepError(
                f"Another TrainStep of this model has run {self._step.num_micro_batches} micro-batch(es) of an "
                "optimizer step, and both use the same gradients. End that step first, or call zero_grad() of either "
                "to discard it."
            )
        accumulator = self._step.shard_accumulator
        # `torch.autograd.grad` of the model's inputs runs FSDP2's hooks, which reduce zeros for the parameters.
        zeros = [parameter for group in self._state.gradients for parameter in group.only_zeros()]
        for parameter in zeros:
            parameter.grad = None
        if accumulator is not None:
            accumulator.discard(zeros)
        sums = accumulator.sums if accumulator is not None else None
        left = next((i for i, p in enumerate(self.parameters) if p.grad is not None or (sums and p in sums)), None)
        if left is not None:
            raise StepError(
                f"{self._fqns[left]} has a gradient before the first backward of an optimizer step. A backward of "
                "another model, or one without TrainStep, left it. Call train.zero_grad() first, which discards it."
            )

    def refuse_low_shards(self) -> None:
        """Raise StepError for a trainable parameter without fp32 shards: it was unfrozen or cast after `wrap_model`.

        Reads only dtypes and flags, without waiting for the device. FSDP2 would train it in the low dtype, or raise
        without the parameter's name.
        """
        for name, parameter in self._averaged.items():
            if parameter.dtype != torch.float32 and parameter.requires_grad:
                raise StepError(
                    f"{name} is trainable, but its shards are in {short_name(parameter.dtype)} instead of fp32: it was "
                    "unfrozen or cast after wrap_model. Unfreeze it before wrap_model, and do not cast a wrapped model."
                )

    def _set_accumulation(self, dtype: torch.dtype) -> None:
        """Sum unsharded gradients in `dtype` in this optimizer step, which may have another number of micro-batches."""
        if self._state.plan.policy.stage >= 2 or dtype == self._step.accumulates_in:
            return
        if not all(set_accumulation_dtype(unit, dtype) for unit in self.units):
            raise StepError(
                "gradient_accumulation_steps must equal the number of micro-batches (or both be more than one) where "
                f"data_types.grad_accum_dtype is {short_name(self._state.plan.policy.grad_accum_dtype)}, at stages 0 "
                f"and 1 on torch {torch.__version__}. Set it, or leave grad_accum_dtype out."
            )
        self._step.accumulates_in = dtype

    def _set_flags(self, *, is_last: bool) -> None:
        """Set FSDP2's flags for the backward of one micro-batch, by its place in the optimizer step.

        Stages 0 and 1 reduce once per optimizer step. With HSDP, stages 2 and 3 sum the micro-batches of each replica,
        and then sum over replicas once. Stages 0 to 2 leave parameters unsharded until the end of the
        optimizer step. Stage 3 does so for the model-wide group only, because the next forward unshards that group
        first. docs/precision.md has the table.
        """
        stage = self._state.plan.policy.stage
        # The methods of the class: those that `wrap_model` sets on a unit are for callers.
        FSDPModule.set_is_last_backward(self._root, is_last)
        for unit in self.units:  # FSDP2's recursive setters would walk through all modules twice
            FSDPModule.set_requires_gradient_sync(unit, is_last or stage >= 2, recurse=False)
            FSDPModule.set_reshard_after_backward(unit, is_last or stage == 3, recurse=False)
        for switch in self._state.replica_switches:
            switch(is_last)
        for group in self._state.plan.groups:
            if group.kind == "model-wide":
                FSDPModule.set_reshard_after_backward(self._state.holders[group.name], is_last, recurse=False)

    def finish(self) -> None:
        """Reshard the parameters, and set their gradients of the optimizer step as sharded fp32 DTensors."""
        reshard(self.units)  # an evaluation since the backward may have left groups unsharded
        if self._step.shard_accumulator is not None:
            self._step.shard_accumulator.flush()

    def with_gradient(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient."""
        return [parameter for parameter in self.parameters if parameter.grad is not None]

    def end(self) -> None:
        """Discard the gradients, so that the next backward begins an optimizer step."""
        if self._step.shard_accumulator is not None:
            self._step.shard_accumulator.drop()
        for parameter in self.parameters:  # also those that no optimizer holds
            parameter.grad = None
        for group in self._state.gradients:
            group.reset()
        self._earlier.note([])
        self._step.reset()

    def discard(self) -> None:
        """Discard the current optimizer step at any point, with all sharded and unsharded gradients of the model."""
        if self._step.owner not in (None, self):
            self._step.owner.discard()
        self._state.root_forward.reset()
        self.arithmetic.end_micro_batch()
        if self._step.is_open:
            for unit in self.units:
                discard_unsharded_gradients(unit)
            reshard(self.units)
        self._set_flags(is_last=True)
        self.end()

    def recover(self) -> None:
        """Forget a failure: discard the optimizer step at whatever point it failed. Its state must be loaded again."""
        self._step.failure, self._step.phase = None, Phase.OPEN
        self._set_flags(is_last=True)
        end_failed_backward(self._root)
        self.discard()

    @contextmanager
    def noting(self, where: Where) -> Iterator[None]:
        """Record an exception that is raised inside the context, and re-raise it."""
        try:
            yield
        except BaseException as error:
            self.arithmetic.end_micro_batch()
            self._step.fail(f"{where} ({type(error).__name__}: {error})")
            raise

    def refuse_after_failure(self, method: str) -> None:
        """Raise StepError if a failure is recorded. The error names `method`."""
        if (failure := self._step.failure) is not None:
            raise StepError(
                f"{method} was called after an earlier failure in {failure}. Load the last checkpoint on every rank "
                "(zeroamp.load_checkpoint with the TrainStep), or restart from it."
            )

    def refuse_unfinished(self, method: str) -> None:
        """Raise StepError if an optimizer step has run a backward but has not ended."""
        if self._step.is_open:
            raise StepError(
                f"{method} was called after {self._step.num_micro_batches} micro-batch(es) of an optimizer step. "
                "Call it between two optimizer steps, after step() returned a report."
            )
