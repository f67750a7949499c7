"""The `Accelerator` of a Trainer with `ZeroampMixin`: a `ZeroampAccelerator` that asks the Trainer for its policy."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader

from zeroamp.integrations.accelerate import ZeroampAccelerator
from zeroamp.integrations.transformers.pretrained import fill_deferred, refuse_unfilled
from zeroamp.policies import Policy


class WrappingTrainer(Protocol):
    """What the accelerator asks the Trainer."""

    def policy_of(self, model: nn.Module) -> Policy:
        """Return the policy for a model, with every "auto" filled."""

    def prepare_wrap(self, model: nn.Module, policy: Policy) -> Mapping[str, Any]:
        """Change a model just before it is wrapped. Returns more arguments of `wrap_model`."""


class TrainerAccelerator(ZeroampAccelerator):
    """A `ZeroampAccelerator` inside of a Trainer, which counts micro-batches and divides losses by itself."""

    _divides_losses = False

    def __init__(self, trainer: WrappingTrainer, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Take the Trainer, the config as far as the arguments fill it, and the arguments of `Accelerator`."""
        self._trainer = trainer
        super().__init__(zeroamp=config, **kwargs)

    def fill_accumulation_steps(self) -> None:
        """Do nothing: accelerate's number is 1 in a Trainer, and the config has the Trainer's."""

    def fill_policy(self, model: nn.Module, loaders: Iterable[DataLoader[Any]] = ()) -> Policy:
        """Return the policy for a model, as the Trainer fills it."""
        del loaders
        self._policy = self._trainer.policy_of(model)
        return self._policy

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model`, wrapped in place, and filled if `from_pretrained` left that to the Trainer."""
        refuse_unfilled(model)
        given, self.wrap_arguments = self.wrap_arguments, dict(self._trainer.prepare_wrap(model, self.policy))
        try:
            wrapped = super().wrap(model)
        finally:
            self.wrap_arguments = given
        fill_deferred(wrapped)
        return wrapped

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """See `ZeroampAccelerator`. A Trainer passes infinity for a norm without clipping."""
        return super().clip_grad_norm_(parameters, 0.0 if math.isinf(max_norm) else max_norm, norm_type)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release what the last training prepared. A Trainer calls this before each, when the model may be wrapped."""
        before = self._before  # of an optimizer that was built before an evaluation wrapped the model
        freed = super().free_memory(*objects)
        self._before = before
        return freed
