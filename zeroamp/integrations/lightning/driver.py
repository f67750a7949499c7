"""`StepDriver`: the calls of a Lightning loop (backward, clip, step, zero_grad), as one `TrainStep` takes them.

[Note: Optimizers of a loop]
A loop calls `step()` of each optimizer, and a `TrainStep` ends an optimizer step for all of them at once. So the driver
updates the optimizer that is stepped, and ends the optimizer step when no other optimizer holds a gradient, or each
other one was stepped, or gave its gradients up by `zero_grad()`.
A loop also calls `optimizer.zero_grad()`, which would release sharded gradients behind the `TrainStep`, and could not
release unsharded ones. So Lightning is given a view of each optimizer: another object of a subclass, with the same
attributes, whose `zero_grad` calls the driver. The `TrainStep` and checkpoints have the optimizer itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import StepError, describe
from zeroamp.training.norm import clip_factor, multiply_gradients
from zeroamp.training.step import TrainStep
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import WrapState, wrap_state

_RAW = "_zeroamp_raw_optimizer"


class ForwardModule(nn.Module):
    """Calls the wrapped model. Lightning redirects methods through a module that is not the model itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, with its hooks."""
        return self.module(*args, **kwargs)


def root_of(module: nn.Module) -> nn.Module:
    """Return the wrapped model inside a `ForwardModule`, or the module."""
    return module.module if isinstance(module, ForwardModule) else module


def raw_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer that a view shows, or the optimizer itself."""
    raw: Optimizer = vars(optimizer).get(_RAW, optimizer)
    return raw


class StepDriver:
    """One wrapped model with its optimizers: see [Note: Optimizers of a loop]."""

    def __init__(self, root: nn.Module, how_to_accumulate: str) -> None:
        """Drive a wrapped model. `how_to_accumulate` is the advice of the error for a second backward.

        Raises:
            StepError: the config has `zeroamp.reproducible`.
        """
        if wrap_state(root).plan.policy.reproducible:
            # The random numbers of the first forward would come before the TrainStep that seeds them.
            raise StepError(
                "zeroamp.reproducible is true, which Lightning's Trainer and Fabric do not support: micro-batches and "
                "losses are theirs. Remove the key, or train with zeroamp.TrainStep, accelerate or transformers' "
                "Trainer."
            )
        self.root = root
        self.optimizers: list[Optimizer] = []
        self.is_accumulating = False
        """Whether the next backward is not the last of its optimizer step."""
        self.report: StepReport | None = None
        """Of the last optimizer step that ended."""
        self._train: TrainStep | None = None
        self._how_to_accumulate = how_to_accumulate
        self._norm: torch.Tensor | None = None
        self._is_clipped = False
        self._done: list[Optimizer] = []  # stepped, or without gradients that are still wanted
        self._has_stepped = False

    @property
    def state(self) -> WrapState:
        """What `wrap_model` attached."""
        return wrap_state(self.root)

    @property
    def train(self) -> TrainStep:
        """The `TrainStep`, built with the optimizers that are there when it is first read."""
        if self._train is None:
            if not self.optimizers:
                raise StepError(
                    f"A backward of {type(self.root).__name__} was called, but no optimizer of its parameters was set "
                    "up. Set one up first."
                )
            self._train = TrainStep(self.root, self.optimizers)
        return self._train

    @property
    def has_train(self) -> bool:
        """Whether `train` was read."""
        return self._train is not None

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Take optimizers of the wrapped model's parameters, before the first backward."""
        if self._train is not None:
            raise StepError(
                f"An optimizer of {type(self.root).__name__} was set up after its first backward. Set up all "
                "optimizers of a model before."
            )
        self.optimizers.extend(optimizers)

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Let backwards inside leave the optimizer step open."""
        outer, self.is_accumulating = self.is_accumulating, enabled
        try:
            yield
        finally:
            self.is_accumulating = outer

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch, whose loss the loop has divided."""
        if self._norm is not None:
            self._end_or_refuse()
        if self.train.micro_batches.is_complete:
            raise StepError(
                "A backward was called again before optimizer.step(). Call optimizer.zero_grad() to discard the "
                f"gradients. To accumulate, {self._how_to_accumulate}"
            )
        self.train.backward(loss, is_last=not self.is_accumulating, divide=False)
        torch.clear_autocast_cache()  # the casts of the loop's own autocast have lost their graph

    def _end_or_refuse(self) -> None:
        left = [own for own in self._left() if _has_gradient(own)]
        if not self._has_stepped or left:
            names = ", ".join(type(own).__name__ for own in left)
            raise StepError(
                f"A backward was called while gradients of an earlier one are left ({names}). Call step() or "
                "zero_grad() of each optimizer first."
            )
        self._end([])

    def norm(self) -> torch.Tensor:
        """Average and unscale the gradients, and return their norm over all ranks, 0-D fp32. Nothing is clipped."""
        if self._norm is None:
            if not self.train.micro_batches.is_complete:
                raise StepError(
                    "An optimizer was stepped, or gradients were clipped, without a last backward of the optimizer "
                    f"step. {self._how_to_accumulate[0].upper()}{self._how_to_accumulate[1:]}"
                )
            self._norm = self.train.clip_grad_norm(0)
        return self._norm

    def clip_norm(self, max_norm: float, optimizer: Optimizer | None = None) -> torch.Tensor:
        """Clip the gradients by their norm, and return the norm before."""
        norm = self.norm()
        self._begin_clipping(optimizer)
        limit = self.state.plan.policy.gradient_clipping
        if limit not in (0, max_norm):
            raise StepError(
                f"Gradients were to be clipped to a norm of {max_norm}, but gradient_clipping is {limit} in the "
                "config. Set one of them."
            )
        if max_norm > 0:
            multiply_gradients(self.train.micro_batches.with_gradient(), clip_factor(norm, max_norm))
        return norm

    def clip_value(self, limit: float, optimizer: Optimizer | None = None) -> None:
        """Limit each element of the gradients to [-limit, limit]."""
        self.norm()
        self._begin_clipping(optimizer)
        if (own := self.state.plan.policy.gradient_clipping) > 0:
            raise StepError(
                f"Gradients were to be clipped by value, but gradient_clipping, a norm, is {own} in the config. Remove "
                "one of them."
            )
        with torch.no_grad():
            for parameter in self.train.micro_batches.with_gradient():
                if parameter.grad is not None:
                    local_part(parameter.grad).clamp_(-limit, limit)

    def _begin_clipping(self, optimizer: Optimizer | None) -> None:
        if self._is_clipped:
            raise StepError("Gradients were clipped twice in one optimizer step. Clip them once, before step().")
        others = [own for own in self._left() if optimizer is not None and own is not raw_optimizer(optimizer)]
        if any(map(_has_gradient, others)) or self._has_stepped:
            raise StepError(
                "Gradients of one of several optimizers were to be clipped, but others have gradients too, and "
                "TrainStep has one norm for all. Set gradient_clipping in the config, or call toggle_optimizer, "
                "so that only one has gradients."
            )
        self._is_clipped = True

    def step(self, optimizer: Optimizer) -> StepReport | None:
        """Update the parameters of one optimizer. Return a report if this ends the optimizer step."""
        raw, norm = self._own(optimizer), self.norm()
        if any(raw is done for done in self._done):
            raise StepError(f"{type(raw).__name__}.step() was called again without a backward. Call backward before.")
        if not self._is_clipped and (limit := self.state.plan.policy.gradient_clipping) > 0:
            multiply_gradients(self.train.micro_batches.with_gradient(), clip_factor(norm, limit))
        self._is_clipped = True
        self._done.append(raw)
        self._has_stepped = True
        if any(map(_has_gradient, self._left())):
            self.train.update_part(raw)
        else:
            self._end([raw])
        torch.clear_autocast_cache()  # the casts of the loop's own autocast are of the old values
        return self.report if self._norm is None else None

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Give the gradients of one optimizer up."""
        raw = self._own(optimizer)
        if self._train is None or self._train.is_between_steps:
            for group in raw.param_groups:  # what a backward of another model left
                for parameter in group["params"]:
                    parameter.grad = None
            return
        if not any(raw is done for done in self._done):
            self._done.append(raw)
        if any(map(_has_gradient, self._left())) or (self._norm is None and self._left()):
            return
        if self._has_stepped:
            self._end([])
        else:
            self._train.zero_grad()
            self._forget()

    def _own(self, optimizer: Optimizer) -> Optimizer:
        raw = raw_optimizer(optimizer)
        if not any(raw is own for own in self.optimizers):
            raise StepError(f"A {type(raw).__name__} was not set up with this model. Set it up with its model.")
        return raw

    def _left(self) -> list[Optimizer]:
        return [own for own in self.optimizers if not any(own is done for done in self._done)]

    def _end(self, optimizers: Sequence[Optimizer]) -> None:
        self.report = self.train.update(optimizers)
        self._forget()

    def _forget(self) -> None:
        self._norm, self._is_clipped, self._done, self._has_stepped = None, False, [], False


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def view_of(optimizer: Optimizer, driver: StepDriver) -> Optimizer:
    """Return a view of `optimizer` whose `zero_grad` calls the driver: see [Note: Optimizers of a loop]."""

    def zero_grad(_view: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            raise StepError(
                describe("set_to_none of zero_grad", "False", "True", "Leave it out: TrainStep releases gradients.")
            )
        driver.zero_grad(optimizer)

    cls = type(optimizer)
    view: Optimizer = object.__new__(type(cls.__name__, (cls,), {"zero_grad": zero_grad}))
    vars(optimizer)[_RAW] = optimizer
    view.__dict__ = vars(optimizer)
    return view
