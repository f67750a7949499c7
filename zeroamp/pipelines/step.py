"""`PipelineStep`: the optimizer steps of a pipeline, whose backwards one of torch's schedules runs.

[Note: Steps of parts]
A `TrainStep` begins with a backward. Here a schedule runs all backwards, and then `train.step()` takes over the
gradients. Ranks of one stage have the same parameters, so they compare orders and hyperparameters among each other, as
in a plain loop (`zeroamp/wrapping/optimizer_hooks.py`). The step's all-reduce goes over the ranks of all stages. It
sums the squared gradients of all parts, the losses of the last stage, and what all ranks must have in common: counts,
loss scale and `max_norm`. So all stages decide alike whether a step is skipped, and change the loss scale alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from zeroamp.hooks._torch.fsdp import discard_unsharded_gradients, end_failed_backward
from zeroamp.hooks._torch.parameter_group import release_groups
from zeroamp.hooks.collectives.collective_calls import IssuedInStep
from zeroamp.hooks.group_gradients import end_backward
from zeroamp.pipelines.gradients import refuse_unreduced, squares_of
from zeroamp.pipelines.parts import join
from zeroamp.planning.mesh import device_of, process_group
from zeroamp.policies.errors import StepError
from zeroamp.training.all_reduce import StepAllReduce
from zeroamp.training.arithmetic import StepArithmetic
from zeroamp.training.gradients import Gradients
from zeroamp.training.optimizer_step import Step
from zeroamp.training.rank_agreement import RankAgreement
from zeroamp.training.refused_arguments import Scheduler
from zeroamp.training.step import TrainStep
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.optimizer_hooks import compare_and_discard
from zeroamp.wrapping.run_alike import run_alike
from zeroamp.wrapping.state import WrapState, models_of, wrap_state
from zeroamp.wrapping.step_state import LossSum, Reduced, StepPhase
from zeroamp.wrapping.unused_parameters import log_without_gradient

LossFunction = Callable[..., torch.Tensor]
"""As the schedules of torch take it: called with an output of the last stage and its target."""


class PipelineStep(TrainStep):
    """Drives the optimizer steps of the parts of a pipeline, after the backwards of a schedule.

    It clips by the config's `gradient_clipping`, scales losses in float16, steps schedulers and returns reports, as a
    `TrainStep` does::

        train = zeroamp.PipelineStep([part], optimizer)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=train.wrap_loss(loss_fn))
        for tokens, labels in loader:
            schedule.step(tokens) if stage.is_first else schedule.step(target=labels)
            report = train.step()
        path = zeroamp.save_checkpoint(folder, train.model, train)

    `model` is all parts of this rank as one module, for `save_checkpoint` and `load_checkpoint`. Its parameters have
    their names in the parts.
    """

    _step: "_PartsStep"

    def __init__(
        self,
        parts: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Scheduler | Sequence[Scheduler | None] | None = None,
        *,
        on_shards: bool | Sequence[bool] = False,
    ) -> None:
        """Attach to all wrapped parts that this rank has. The ranks of all stages call it.

        Args:
            parts: all parts of this rank, or the only one, wrapped by `wrap_model` over the same ranks.
            optimizer: as for `TrainStep`. For a checkpoint that resumes on another number of stages, build one
                optimizer for all parts of a rank, with the same param groups on all stages.
            scheduler: as for `TrainStep`.
            on_shards: as for `TrainStep`.

        Raises:
            StepError: as for `TrainStep`, on the ranks of all stages. Also if there is no part, or two parts have a
                parameter of the same name.
            WrapError: a part is not wrapped.
        """
        of_rank = [parts] if isinstance(parts, nn.Module) else list(parts)
        stages = next((state.axes.stages for state in map(wrap_state, of_rank)), None)

        def attach() -> tuple[bool, dict[str, str]]:
            super(PipelineStep, self).__init__(join(of_rank), optimizer, scheduler, on_shards=on_shards)
            return True, {}

        if stages is None:
            attach()
            return
        remedy = "Pass all parts that each rank has."
        group, device = stages.get_group(), device_of(stages)
        run_alike(attach, what="PipelineStep", remedy=remedy, error_type=StepError, group=group, device=device)

    def _step_of(self, state: WrapState) -> Step:
        return _PartsStep(state)

    def wrap_loss(self, loss_fn: LossFunction) -> LossFunction:
        """Return the loss function for the schedule: under the config's autocast, noted for reports, and scaled.

        Args:
            loss_fn: returns the loss of one micro-batch, a tensor of one element: its mean over the micro-batch, if
                the schedule has `scale_grads=True`.

        Returns:
            A function with the same arguments. Its result is in fp32, times the loss scale in float16.
        """
        step = self._step

        def scaled(*args: Any, **kwargs: Any) -> torch.Tensor:
            with self.autocast():
                loss = loss_fn(*args, **kwargs)
            if loss.requires_grad:  # noted by its backward: an evaluation runs none
                value = loss.detach()
                loss.register_hook(lambda _grad: step.note_loss(value))  # type: ignore[no-untyped-call]
            return step.scaler.scale_loss(loss.float())

        return scaled

    def step(self) -> StepReport:
        """End the optimizer step after `schedule.step()`: run `clip_grad_norm()`, then `update()`.

        Returns:
            The report. Its loss is the mean over the micro-batches and the data ranks, on all ranks. It is NaN if the
            schedule's loss function is not from `wrap_loss`.

        Raises:
            StepError: no backward ran since the last call, the schedule has not reduced the gradients, or the ranks
                have different settings. In float16 and without an axis "pp", also if the schedule's loss function is
                not from `wrap_loss`. Also as `TrainStep.step`.
            PeerError: the backend ended a collective, because it timed out or another rank's process ended.
            CheckpointError: a background save failed. The optimizer step was taken.
        """
        self._step.begin("PipelineStep.step")
        report = super().step()
        if report is None:
            raise AssertionError("expected a report: each schedule.step() is one optimizer step")
        return report

    def clip_grad_norm(self, max_norm: float | None = None) -> torch.Tensor:
        """Clip the gradients of all parts and return their norm before clipping, as `TrainStep.clip_grad_norm`."""
        self._step.begin("PipelineStep.clip_grad_norm")
        return super().clip_grad_norm(max_norm)

    def backward(self, *_args: Any, **_kwargs: Any) -> None:
        """Raise StepError: the schedule runs the backwards."""
        raise _of_schedule("backward")

    def no_sync(self) -> NoReturn:
        """Raise StepError: the schedule runs the backwards."""
        raise _of_schedule("no_sync")


def _of_schedule(method: str) -> StepError:
    return StepError(
        f"PipelineStep.{method} was called, but the schedule runs the backwards of a pipeline. Pass "
        "loss_fn=train.wrap_loss(loss_fn) to the schedule, and call train.step() after schedule.step()."
    )


class _PartsStep(Step):
    """Runs the optimizer steps of the parts of this rank: see [Note: Steps of parts]."""

    def __init__(self, state: WrapState) -> None:
        super().__init__(state)
        states = [wrap_state(part) for part in models_of(state)]
        self._parts = [(each, Gradients(each)) for each in states]
        self._has_logged = False  # parameters without a gradient
        for each in states:
            each.step.is_scheduled = True
        self.arithmetic = _PartsArithmetic(state, self.gradients, self._parts)
        axes = replace(state.axes, tensor=None)  # a part need not have parameters of the tensor axis
        world = state.world if state.axes.stages is None else process_group(state.axes.whole)
        self._all_ranks = replace(state, axes=axes, world=world, gradients=(), issued=IssuedInStep())
        self.all_reduce = _PartsAllReduce(self._all_ranks, self.gradients, self.arithmetic, self.callbacks)

    def attach(self, optimizers: Sequence[torch.optim.Optimizer], on_shards: Sequence[bool]) -> None:
        """Add optimizers, which are checked. What stages have in common does not depend on their optimizers."""
        super().attach(optimizers, on_shards)
        if self._agreement is not None:
            self._agreement = self.all_reduce.agreement = RankAgreement(self._all_ranks, ())

    @property
    def is_between_steps(self) -> bool:
        """Whether the schedule has run no backward yet since the last optimizer step."""
        return super().is_between_steps and not self.gradients.present()

    def note_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch of the last stage, whose backward runs.

        Before its first micro-batch, a schedule runs a backward of uninitialised values, which finds shapes. Only
        before the others it sets the flag.
        """
        if not any("set_requires_gradient_sync" in state.set_by_caller for state, _ in self._parts):
            return
        self.current.add_loss(loss, is_divided=False, retains_each=False)
        self.current.num_micro_batches += 1

    def begin(self, call: str) -> None:
        """Take over the gradients of the schedule's backwards, unless `clip_grad_norm` has done so.

        Raises:
            StepError: there are none, or they are not reduced. The error names `call`.
        """
        current = self.current
        if current.phase is not StepPhase.IDLE:
            return
        for state, _ in self._parts:
            refuse_unreduced(state, call)
        self.gradients.refuse_low_shards()
        for optimizer in self.optimizers:
            compare_and_discard(optimizer)
        for state, gradients in self._parts:
            num_present = len(gradients.present())
            if num_present < len(gradients.parameters) and not self._has_logged:
                self._has_logged = log_without_gradient(state, gradients.parameters)
            if num_present == 0 and any(each.requires_grad for each in gradients.parameters):
                raise StepError(
                    f"{call} found no gradient on any parameter of a part. Call it after schedule.step(). A zero "
                    "bubble schedule of torch computes none for a part whose inputs need no gradient, as after a "
                    "frozen one: use another schedule there."
                )
        end_backward(self.state.gradients)
        self.state.root.training = self._parts[0][0].root.training
        current.owner, current.phase, current.is_stepped = self, StepPhase.COMPLETE, False
        current.gradient_scale = self.scaler.scale

    def reduce(self, max_norm: float = 0.0) -> Reduced:
        """Run the step's all-reduce, as `Step.reduce`. Until the step ends, the parts run no backward."""
        reduced = super().reduce(max_norm)
        for state, _ in self._parts:
            state.step.phase, state.step.owner = StepPhase.REDUCED, self
        return reduced

    def end(self) -> None:
        """End the optimizer step: discard its gradients."""
        super().end()
        for state, _ in self._parts:
            state.step.reset()

    def abandon(self) -> None:
        """Discard all gradients of the parts, at any point."""
        self.state.root_forward.reset()
        discard_unsharded_gradients(self.units)
        release_groups(self._groups)
        self.end()

    def recover(self) -> None:
        """Make steps possible after a failed one, whose parameters and state were loaded again."""
        self.current.failure, self.current.phase = None, StepPhase.OPEN
        for state, _ in self._parts:
            end_failed_backward(state.root)  # type: ignore[arg-type]
        self.discard()


class _PartsAllReduce(StepAllReduce):
    """Sums the numbers of the optimizer steps over the ranks of all stages."""

    def refuse_no_gradient(self) -> None:
        """Accept a rank whose parts are frozen."""


class _PartsArithmetic(StepArithmetic):
    """Sums the squares of all parts, and averages the losses of the ranks that have the last stage."""

    def __init__(self, state: WrapState, gradients: Gradients, parts: Sequence[tuple[WrapState, Gradients]]) -> None:
        super().__init__(state, gradients)
        self._parts = parts
        self._needs_loss = state.plan.policy.low_dtype == torch.float16 or state.axes.stages is None

    def local(self, losses: Sequence[LossSum]) -> torch.Tensor:
        """Return this rank's mean loss, whether it has one, and its part of the squares: 1-D fp64 of 3 elements."""
        numbers = torch.zeros(3, dtype=torch.float64, device=self._device)
        for loss in losses:
            numbers[0] = loss.terms[0] / self._state.step.num_micro_batches
            numbers[1] = 1
        numbers[2] = torch.stack([squares_of(*part, self._num_ranks) for part in self._parts]).sum()
        return numbers

    def totals(self, summed: torch.Tensor, losses: Sequence[LossSum]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss and the sum of squared gradients, 0-D fp64 each, from the sums over ranks of `local`.

        Raises:
            StepError: no rank has a loss. In float16 the gradients are then not scaled. In a mesh without a pipeline
                axis, the loss is on ranks over which nothing is summed.
        """
        del losses
        if self._needs_loss and float(summed[1]) == 0:
            raise StepError(
                "PipelineStep.step found no loss of wrap_loss on any rank. Pass loss_fn=train.wrap_loss(loss_fn) to "
                'the schedule: it scales losses in float16. Name the axis of the stages "pp" in the mesh.'
            )
        return summed[0] / summed[1], summed[2]
