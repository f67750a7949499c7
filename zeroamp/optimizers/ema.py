"""`EMA`: an exponential moving average of the weights of a wrapped model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import StepError
from zeroamp.training.callbacks import Callback
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import reshard, wrap_state


class EMA(Callback):
    """A callback: after each optimizer step that was not skipped, `average = decay * average + (1 - decay) * weight`.

    The averages of the trainable parameters begin with the present values, and are sharded like these.
    `save_checkpoint` and `load_checkpoint` save and load them. Buffers are not averaged.

    ```python
    ema = zeroamp.EMA(model, decay=0.999)
    train.callbacks.append(ema)
    with ema.applied():  # between two optimizer steps, on all ranks
        zeroamp.export_hf(model, "out")
    ```
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Copy the weights of a wrapped model. Raises StepError if `decay` is not from 0 to below 1."""
        if not 0 <= decay < 1:
            raise StepError(f"decay of zeroamp.EMA must be from 0 to below 1, but is {decay}.")
        self._root, self._decay = wrap_state(model).root, decay
        reshard(self._root.modules())
        self._weights = {fqn: each.detach() for fqn, each in self._root.named_parameters() if each.requires_grad}
        self._averages = {fqn: weight.clone() for fqn, weight in self._weights.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by FQN. A load of a checkpoint writes into them."""
        return self._averages

    def on_step_end(self, report: StepReport, /) -> None:
        """Update the averages."""
        for fqn, average in () if report.skipped else self._averages.items():
            local_part(average).lerp_(local_part(self._weights[fqn]), 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averages inside the context, for an evaluation or an export. All ranks call it."""
        trained = {fqn: weight.clone() for fqn, weight in self._weights.items()}
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(trained)

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        reshard(self._root.modules())
        for fqn, weight in self._weights.items():
            local_part(weight).copy_(local_part(values[fqn]))
