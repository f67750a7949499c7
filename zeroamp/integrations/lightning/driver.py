"""`StepDriver`: translates the calls of a Lightning loop (backward, clip, step, zero_grad) for one `TrainStep`.

[Note: Optimizers of a loop]
A loop calls `step()` of each optimizer, but a `TrainStep` ends an optimizer step for all of them at once. So the driver
updates each optimizer when it is stepped. It ends the optimizer step when every other optimizer has no gradients, was
stepped, or had its gradients discarded by `zero_grad()`.
A loop also calls `optimizer.zero_grad()`. That would release sharded gradients without the `TrainStep`, and could not
release unsharded ones. So Lightning gets a view of each optimizer: another object, of a subclass, that shares the
optimizer's attributes and whose `zero_grad` calls the driver. The `TrainStep` and checkpoints use the optimizer itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import StepError, describe
from zeroamp.training.norm_and_clip import clip_factor, multiply_gradients
from zeroamp.training.step import TrainStep, driver_of
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import WrapState, wrap_state

_RAW = "_zeroamp_raw_optimizer"


class ForwardModule(nn.Module):
    """Calls the wrapped model. Lightning needs a module other than the model for redirecting methods."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, with its hooks."""
        return self.module(*args, **kwargs)


def root_of(module: nn.Module) -> nn.Module:
    """Return the wrapped model inside a `ForwardModule`, or the module itself."""
    return module.module if isinstance(module, ForwardModule) else module


def raw_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer behind a view, or the optimizer itself."""
    raw: Optimizer = vars(optimizer).get(_RAW, optimizer)
    return raw


class StepDriver:
    """Drives the `TrainStep` of one wrapped model and its optimizers: see [Note: Optimizers of a loop]."""

    def __init__(self, root: nn.Module, how_to_accumulate: str) -> None:
        """`root`: the wrapped model. `how_to_accumulate`: the remedy in the error for a second backward.

        Raises:
            StepError: the config has `zeroamp.reproducible`.
        """
        if wrap_state(root).plan.policy.reproducible:
            # The first forward would draw random numbers before there is a TrainStep that seeds them.
            raise StepError(
                "zeroamp.reproducible must not be true with Lightning's Trainer and Fabric: they count micro-batches "
                "and divide losses themselves. Remove the key, or train with zeroamp.TrainStep, accelerate or "
                "transformers' Trainer."
            )
        self.root = root
        self.optimizers: list[Optimizer] = []
        self.is_accumulating = False
        """Whether the next backward is not the last of its optimizer step."""
        self.report: StepReport | None = None
        """The report of the last complete optimizer step."""
        self._train: TrainStep | None = None
        self._how_to_accumulate = how_to_accumulate
        self._norm: torch.Tensor | None = None
        self._is_clipped = False
        self._done: list[Optimizer] = []  # stepped in this optimizer step, or their gradients were discarded
        self._has_stepped = False

    @property
    def state(self) -> WrapState:
        """The state that `wrap_model` attached to the model."""
        return wrap_state(self.root)

    @property
    def train(self) -> TrainStep:
        """The `TrainStep`. It is built at the first read, with the optimizers added so far."""
        if self._train is None:
            if not self.optimizers:
                raise StepError(
                    f"A backward of {type(self.root).__name__} was called before an optimizer of its parameters was "
                    "set up. Set one up first."
                )
            self._train = TrainStep(self.root, self.optimizers)
        return self._train

    @property
    def has_train(self) -> bool:
        """Whether `train` was read."""
        return self._train is not None

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

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch. The loop has divided the loss by the number of micro-batches."""
        if self._norm is not None:
            self._end_or_refuse()
        if driver_of(self.train).is_reduced:
            raise StepError(
                "A backward was called again before optimizer.step(). Call optimizer.zero_grad() to discard the "
                f"gradients. To accumulate, {self._how_to_accumulate}"
            )
        self.train.backward(loss, is_last=not self.is_accumulating, divide=False)
        torch.clear_autocast_cache()  # the graphs of casts in the loop's own autocast are released

    def _end_or_refuse(self) -> None:
        left = [own for own in self._left() if _has_gradient(own)]
        if not self._has_stepped or left:
            names = ", ".join(type(own).__name__ for own in left)
            raise StepError(
                f"A backward was called while optimizers have unused gradients of an earlier one ({names}). Call "
                "step() or zero_grad() of each optimizer first."
            )
        self._end([])

    def norm(self) -> torch.Tensor:
        """Average and unscale the gradients, and return their norm over all ranks, 0-D fp32. Does not clip."""
        if self._norm is None:
            if not driver_of(self.train).is_reduced:
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
                f"Gradients cannot be clipped to a norm of {max_norm}, since gradient_clipping is {limit} in the "
                "config. Set only one of the two."
            )
        if max_norm > 0:
            multiply_gradients(driver_of(self.train).micro_batches.with_gradient(), clip_factor(norm, max_norm))
        return norm

    def clip_value(self, limit: float, optimizer: Optimizer | None = None) -> None:
        """Clamp each element of the gradients to [-limit, limit]."""
        self.norm()
        self._begin_clipping(optimizer)
        if (own := self.state.plan.policy.gradient_clipping) > 0:
            raise StepError(
                f"Gradients cannot be clipped by value, since gradient_clipping, a norm, is {own} in the config. "
                "Remove one of the two."
            )
        with torch.no_grad():
            for parameter in driver_of(self.train).micro_batches.with_gradient():
                if parameter.grad is not None:
                    local_part(parameter.grad).clamp_(-limit, limit)

    def _begin_clipping(self, optimizer: Optimizer | None) -> None:
        if self._is_clipped:
            raise StepError("Gradients were clipped twice in one optimizer step. Clip them once, before step().")
        others = [own for own in self._left() if optimizer is not None and own is not raw_optimizer(optimizer)]
        if any(map(_has_gradient, others)) or self._has_stepped:
            raise StepError(
                "Gradients of one optimizer cannot be clipped while other optimizers have gradients too: TrainStep "
                "computes one norm of all. Set gradient_clipping in the config, or call toggle_optimizer, so that only "
                "one optimizer has gradients."
            )
        self._is_clipped = True

    def step(self, optimizer: Optimizer) -> StepReport | None:
        """Update the parameters of one optimizer. Return a report if this ends the optimizer step."""
        raw, norm = self._own(optimizer), self.norm()
        if any(raw is done for done in self._done):
            raise StepError(f"{type(raw).__name__}.step() was called again without a backward. Call backward first.")
        if not self._is_clipped and (limit := self.state.plan.policy.gradient_clipping) > 0:
            multiply_gradients(driver_of(self.train).micro_batches.with_gradient(), clip_factor(norm, limit))
        self._is_clipped = True
        self._done.append(raw)
        self._has_stepped = True
        if any(map(_has_gradient, self._left())):
            driver_of(self.train).update_part(raw)
        else:
            self._end([raw])
        torch.clear_autocast_cache()  # the loop's own autocast has cached casts of the old values
        return self.report if self._norm is None else None

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Discard the gradients of one optimizer."""
        raw = self._own(optimizer)
        if self._train is None or driver_of(self._train).is_between_steps:
            for group in raw.param_groups:  # gradients by the backward of another model
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
            raise StepError(f"A {type(raw).__name__} was not set up with this model. Set up both together.")
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
