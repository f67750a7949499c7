"""The `Accelerator` of a Trainer with `ZeroampMixin`: a `ZeroampAccelerator` whose policy comes from the Trainer."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroamp.integrations.accelerate import ZeroampAccelerator
from zeroamp.integrations.transformers.pretrained import fill_deferred, refuse_unfilled
from zeroamp.policies.policy import Policy

if TYPE_CHECKING:
    from zeroamp.integrations.transformers.trainer import ZeroampMixin


class TrainerAccelerator(ZeroampAccelerator):
    """A `ZeroampAccelerator` inside a Trainer. The Trainer counts micro-batches and divides losses."""

    _divides_losses = False

    def __init__(self, trainer: "ZeroampMixin", config: Mapping[str, Any], **kwargs: Any) -> None:
        """`config`: filled as far as possible without a model. `kwargs`: of `Accelerator`."""
        self._trainer = trainer
        super().__init__(zeroamp=config, **kwargs)

    def fill_accumulation_steps(self) -> None:
        """Do nothing: in a Trainer, accelerate's number is 1 and the config has the Trainer's number."""

    def fill_policy(self, model: nn.Module) -> Policy:
        """Return the Trainer's policy for a model."""
        self._policy = self._trainer.policy_of(model)
        return self._policy

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap `model` in place, fill it if `from_pretrained` left that to the Trainer, and return it."""
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
        """Release what the last training prepared. A Trainer calls this before each training."""
        before = self._before  # for an optimizer that was built before an evaluation wrapped the model
        freed = super().free_memory(*objects)
        self._before = before
        return freed
