"""`StepState`: the optimizer step of a wrapped model: its phase, its micro-batches, and the scale of its gradients.

One object per wrapped model, `WrapState.step`, because the gradients belong to the model. The `Step` of a `TrainStep`
or of the observed step of `Ledger.verify` changes it. Everybody else reads it.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from zeroamp.policies.errors import StepError

if TYPE_CHECKING:
    from zeroamp.accumulation.shard_accumulator import ShardAccumulator


class StepPhase(Enum):
    """Where a model is in an optimizer step."""

    IDLE = "between two optimizer steps"
    OPEN = "between the micro-batches of an optimizer step"
    COMPLETE = "after the last backward of an optimizer step"
    REDUCED = "after the all-reduce of an optimizer step, with averaged, unscaled, clipped gradients"
    FAILED = "after a failure"


class Owner(Protocol):
    """Runs the micro-batches of an optimizer step."""

    def abandon(self) -> None:
        """Discard the optimizer step and all its gradients."""


class LossSum(NamedTuple):
    """A sum of losses of one rank, and the number to divide it by."""

    terms: torch.Tensor
    """1-D fp32: the sum as one element; or one element per micro-batch, where the order of additions matters."""
    divisor: int
    """The mean of the losses is the sum of `terms`, divided by this number."""
    is_divided: bool
    """Whether `TrainStep.backward` divided the losses by `gradient_accumulation_steps`."""


@dataclass(slots=True)
class Reduced:
    """The results of the all-reduce of an optimizer step."""

    loss: torch.Tensor
    """0-D fp64: see `StepReport.loss_tensor`."""
    norm: torch.Tensor
    """0-D fp32: unscaled, before clipping."""
    scale: float
    """The loss scale of this step's losses."""
    skipped: bool = False
    """Whether a gradient is not finite, so that nothing is updated."""


@dataclass(slots=True)
class StepState:
    """The state of the current optimizer step of a model."""

    phase: StepPhase = StepPhase.IDLE
    owner: Owner | None = None
    """Who runs the optimizer step. None between two steps."""
    num_micro_batches: int = 0
    """Backwards that have run in this optimizer step."""
    is_counted: bool = False
    """Whether the config counts the backwards of this step. Otherwise the caller passes `is_last`."""
    is_stepped: bool = True
    """Whether `TrainStep.step` was called since the last backward."""
    was_in_no_sync: bool = False
    """Whether the last backward ran inside `no_sync`."""
    gradient_scale: float = 1.0
    """The factor by which the gradients of the shards are scaled: the loss scale, or 1 after the unscaling."""
    num_divided: int = 0
    """Losses of this step that `backward` divided by `gradient_accumulation_steps`."""
    reduced: Reduced | None = None
    """The results of the all-reduce, until the step ends."""
    is_clipped: bool = False
    """Whether the loop of an integration has clipped the gradients itself."""
    is_applied: bool = False
    """Whether an optimizer was stepped."""
    done: list[torch.optim.Optimizer] = field(default_factory=list)
    """The optimizers that were stepped, or whose gradients the loop of an integration has discarded."""
    _terms: dict[bool, list[torch.Tensor]] = field(default_factory=lambda: {True: [], False: []})
    """The losses of this rank, by whether `backward` divided them."""

    failure: str | None = None
    """The first exception of a backward or step, as text: where, class and message. Gradients may be missing, and
    parameters may be updated in part, so no step runs after it. The exception itself would retain tensors."""
    trained_by: str | None = None
    """Which integration runs the optimizer steps, and what to call there: the end of an error's sentence."""
    is_scheduled: bool = False
    """Whether a schedule of a pipeline runs the backwards, and a `PipelineStep` the rest of the optimizer steps."""
    is_unwrapped: bool = False
    """Whether `unwrap_model` has taken the model out of zeroamp."""
    is_observed: bool = False
    """Whether an observed step is running, which restores all state: see `ledger/observed_step.py`."""
    accumulates_in: torch.dtype = torch.float32
    """The dtype in which FSDP2 sums unsharded gradients now."""
    shard_accumulator: "ShardAccumulator | None" = None
    """Sums sharded gradients over micro-batches. None if FSDP2 sums them."""

    @property
    def is_open(self) -> bool:
        """Whether an optimizer step has run a backward and has not ended."""
        return self.phase in (StepPhase.OPEN, StepPhase.COMPLETE, StepPhase.REDUCED)

    def add_loss(self, loss: torch.Tensor, *, is_divided: bool, retains_each: bool) -> None:
        """Add the loss of one micro-batch, a tensor of one element in any floating-point dtype, in fp32."""
        loss, terms = loss.detach().float().reshape(()), self._terms[is_divided]
        self.num_divided += is_divided
        if terms and not retains_each:
            terms[0] = terms[0] + loss
        else:
            terms.append(loss)

    @property
    def are_divided(self) -> bool | None:
        """Whether `backward` divided the losses: True if it divided any, None before the first loss."""
        return True if self._terms[True] else (False if self._terms[False] else None)

    def loss_sums(self) -> list[LossSum]:
        """Return the sum of the divided losses and the sum of the others, without empty sums."""
        divisors = {True: self.num_divided, False: 1}
        return [LossSum(torch.stack(terms), divisors[kind], kind) for kind, terms in self._terms.items() if terms]

    def fail(self, failure: str) -> None:
        """Record the first failure. No optimizer step of the model runs after it."""
        if self.failure is None:  # later exceptions follow from the first
            self.failure = failure
            self.phase, self.owner = StepPhase.FAILED, None

    def refuse_after_failure(self, method: str) -> None:
        """Raise StepError if a failure is recorded, or the model was unwrapped. The error names `method`."""
        if self.is_unwrapped:
            raise StepError(
                f"{method} was called after unwrap_model, which gave the model other parameters. Call wrap_model "
                "again, and build the optimizer and the TrainStep from the model that it returns."
            )
        if (failure := self.failure) is not None:
            raise StepError(
                f"{method} was called after an earlier failure in {failure}. Load the last checkpoint on every rank "
                "(zeroamp.load_checkpoint with the TrainStep), or restart from it."
            )

    def refuse_unfinished(self, method: str) -> None:
        """Raise StepError if an optimizer step has run a backward but has not ended."""
        if self.is_open:
            raise StepError(
                f"{method} was called after {self.num_micro_batches} micro-batch(es) of an optimizer step. "
                "Call it between two optimizer steps, after step() returned a report."
            )

    def reset(self) -> None:
        """End the optimizer step."""
        self.phase = StepPhase.IDLE if self.failure is None else StepPhase.FAILED
        self.owner, self.num_micro_batches, self.gradient_scale = None, 0, 1.0
        self.is_counted, self.is_stepped = False, True
        self.reduced, self.is_clipped, self.is_applied, self.done = None, False, False, []
        self._terms, self.num_divided = {True: [], False: []}, 0
