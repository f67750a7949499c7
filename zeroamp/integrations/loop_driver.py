"""`LoopDriver`: translates the calls of a library's loop (backward, clip, step, zero_grad) for one `TrainStep`.

Lightning, accelerate and transformers' Trainer share it.

[Note: Optimizers of a loop]
A loop calls `step()` of each optimizer, but a `TrainStep` ends an optimizer step for all of them at once. So the driver
applies each optimizer when it is stepped. It ends the optimizer step when every other optimizer has no gradients, was
stepped, or had its gradients discarded by `zero_grad()`. What was done in an optimizer step is in `StepState`, which
forgets it at the end of the step, however it ends.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from zeroamp.optimizers.kinds import is_of_bitsandbytes
from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import StepError, WrapError
from zeroamp.training.norm_and_clip import clip_factor, multiply_gradients
from zeroamp.training.optimizer_step import Step
from zeroamp.training.step import TrainStep, step_of
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import wrap_state
from zeroamp.wrapping.step_state import StepPhase


class LoopDriver:
    """Drives the `TrainStep` of one wrapped model and its optimizers: see [Note: Optimizers of a loop]."""

    def __init__(self, root: nn.Module, how_to_accumulate: str, *, reopens: bool = False) -> None:
        """Take a wrapped model.

        Args:
            root: the wrapped model.
            how_to_accumulate: the remedy, without its first word "Run", in errors about the order of calls.
            reopens: whether a backward after the last one continues the optimizer step. False: it is an error.
        """
        self.root = root
        self.optimizers: list[Optimizer] = []
        self.is_accumulating = False
        """Whether the next backward is not the last of its optimizer step."""
        self.report: StepReport | None = None
        """The report of the last complete optimizer step."""
        self.was_skipped = False
        """Whether the last `step` left its optimizer as it was, because a gradient was not finite."""
        self._policy = wrap_state(root).plan.policy
        self._train: TrainStep | None = None
        self._how_to_accumulate, self._reopens = how_to_accumulate, reopens

    @property
    def train(self) -> TrainStep:
        """The `TrainStep`. It is built at the first read, with the optimizers added so far."""
        if self._train is None:
            if not self.optimizers:
                raise StepError(
                    f"A backward of {type(self.root).__name__} was called before an optimizer of its parameters was "
                    "set up. Set one up first."
                )
            # A loop cannot pass `on_shards` itself. LAMB and LARS are refused even so.
            on_shards = [is_of_bitsandbytes(optimizer) for optimizer in self.optimizers]
            self._train = TrainStep(self.root, self.optimizers, on_shards=on_shards)
        return self._train

    @property
    def _step(self) -> Step:
        return step_of(self.train)

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Add optimizers of the wrapped model's parameters, before the first backward."""
        if self._train is not None:
            raise StepError(
                f"An optimizer of {type(self.root).__name__} was set up after its first backward. Set up all "
                "optimizers of a model before its first backward."
            )
        self.optimizers.extend(optimizers)

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Make the backwards inside the context accumulate: none of them is the last of its optimizer step."""
        outer, self.is_accumulating = self.is_accumulating, enabled
        try:
            yield
        finally:
            self.is_accumulating = outer

    def backward(self, loss: torch.Tensor, *, divide: bool = False) -> None:
        """Run the backward of one micro-batch. `divide`: see `TrainStep.backward`."""
        step = self._step
        if step.phase is StepPhase.REDUCED:
            self._end_or_refuse()
        if step.is_complete and not self._reopens:
            raise StepError(
                "A backward was called again before optimizer.step(). Call optimizer.zero_grad() to discard the "
                f"gradients. To accumulate, run {self._how_to_accumulate}"
            )
        step.backward(loss, last=not self.is_accumulating, divide=divide)

    def _end_or_refuse(self) -> None:
        left = [own for own in self._left() if _has_gradient(own)]
        if not self._step.current.is_applied or left:
            names = ", ".join(type(own).__name__ for own in left)
            raise StepError(
                f"A backward was called while optimizers have unused gradients of an earlier one ({names}). Call "
                "step() or zero_grad() of each optimizer first."
            )
        self.report = self.train.update([])

    def norm(self, max_norm: float | None = 0) -> torch.Tensor:
        """Average and unscale the gradients, and return their norm over all ranks, 0-D fp32.

        `max_norm`: see `TrainStep.clip_grad_norm`. It has no effect if the norm was computed before.
        """
        step = self._step
        if step.phase is StepPhase.REDUCED:
            return step.reduce().norm
        if not step.is_complete:
            raise StepError(
                "An optimizer was stepped, or gradients were clipped, without a last backward of the optimizer step. "
                f"Run {self._how_to_accumulate}"
            )
        return self.train.clip_grad_norm(max_norm)

    def clip_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of all optimizers by their norm, and return the norm before."""
        self._refuse_clipping()
        step = self._step
        is_first = step.phase is not StepPhase.REDUCED
        norm = self.norm(max_norm)
        step.current.is_clipped = True
        if max_norm > 0 and not is_first:
            multiply_gradients(step.gradients.present(), clip_factor(norm, max_norm))
        return norm

    def clip_value(self, limit: float) -> None:
        """Clamp each element of the gradients of all optimizers to [-limit, limit]."""
        self._refuse_clipping()
        if (own := self._policy.gradient_clipping) > 0:
            raise StepError(
                f"Gradients cannot be clipped by value, since gradient_clipping, a norm, is {own} in the config. "
                "Remove one of the two."
            )
        self.norm()
        self._step.current.is_clipped = True
        for parameter in self._step.gradients.present():
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-limit, limit)

    def _refuse_clipping(self) -> None:
        current = self._step.current
        if current.is_clipped:
            raise StepError("Gradients were clipped twice in one optimizer step. Clip them once, before step().")
        if current.is_applied:
            raise StepError(
                "Gradients were clipped after the step of another optimizer: TrainStep computes one norm of all. Clip "
                "before the first step()."
            )

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters of one optimizer. `report` changes if this ends the optimizer step."""
        self._refuse_foreign(optimizer)
        step, limit = self._step, self._policy.gradient_clipping
        if not step.current.is_clipped and limit > 0:
            self.clip_norm(limit)
        self.norm()
        if not any(optimizer is own for own in self._left()):
            name = type(optimizer).__name__
            raise StepError(f"{name}.step() was called again without a backward. Call backward first.")
        self.was_skipped = step.reduce().skipped
        if any(own is not optimizer and _has_gradient(own) for own in self._left()):
            with step.callbacks.phase("optimizer"):
                step.apply(optimizer)
        else:
            self.report = self.train.update([optimizer])
        torch.clear_autocast_cache()  # the loop's own autocast has cached casts of the old values

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Discard the gradients of one optimizer."""
        self._refuse_foreign(optimizer)
        if self._train is None or self._step.is_between_steps:
            for group in optimizer.param_groups:  # gradients by the backward of another model
                for parameter in group["params"]:
                    parameter.grad = None
            return
        step = self._step
        if any(optimizer is own for own in self._left()):
            step.current.done.append(optimizer)
        if any(map(_has_gradient, self._left())) or (step.phase is not StepPhase.REDUCED and self._left()):
            return
        if step.current.is_applied:
            self.report = self.train.update([])
        else:
            self._train.zero_grad()

    def _refuse_foreign(self, optimizer: Optimizer) -> None:
        if not any(optimizer is own for own in self.optimizers):
            raise StepError(f"A {type(optimizer).__name__} was not set up with this model. Set up both together.")

    def _left(self) -> list[Optimizer]:
        """Return the optimizers that were neither stepped nor had their gradients discarded."""
        done = self._step.current.done
        return [own for own in self.optimizers if not any(own is each for each in done)]


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def refuse_shared_samples(model: nn.Module, library: str, num_ranks: int) -> None:
    """Raise WrapError for a wrapped model if a library deals the batches to other ranks than those that need them.

    The ranks of a tensor or context axis need the same samples. A library that gives each rank a batch of its own is
    right on data and expert axes only. accelerate counts one rank if it finds no accelerator and was not told to use
    the CPU.

    Args:
        model: that `wrap_model` returned.
        library: who deals the batches, as the subject of a sentence.
        num_ranks: the ranks to which it deals them.
    """
    axes = wrap_state(model).axes
    if axes.num_data < axes.whole.size():
        raise WrapError(
            f"{library} gives each of {axes.whole.size()} ranks samples of its own, but on the mesh of this model "
            f"({axes.describe()}) only {axes.num_data} ranks get different samples: those of a tensor or context axis "
            "need the same ones. Train it by zeroamp.TrainStep in a loop of your own, with "
            f"DistributedSampler(data, {axes.num_data}, the rank's number in the data axis)."
        )
    if num_ranks < axes.num_data:
        raise WrapError(
            f"{library} deals samples to {num_ranks} of the {axes.num_data} ranks of this model, so each of them would "
            "train on all data. Start the script with torchrun. Without a GPU, pass cpu=True to ZeroampAccelerator, or "
            "use_cpu=True to TrainingArguments."
        )
