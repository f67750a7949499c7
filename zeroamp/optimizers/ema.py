"""`EMA`: an exponential moving average of the weights of a wrapped model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import StepError
from zeroamp.training.callbacks import Callback, Phase
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import reshard, wrap_state


class EMA(Callback):
    """A callback: after each optimizer step that was not skipped, `average = decay * average + (1 - decay) * weight`.

    The averages of the trainable parameters begin with the present values, and are sharded like these. Buffers are not
    averaged. Only a `TrainStep` calls it. `save_checkpoint` and `load_checkpoint` save and load the averages, if the
    EMA is in `train.callbacks` then, and by its decay: several need different ones.

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
        self._is_applied = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by name in a checkpoint, whose load writes into them."""
        self._refuse_applied("A checkpoint was saved or loaded")
        return {f"EMA({self._decay:g}).{fqn}": average for fqn, average in self._averages.items()}

    def on_phase_begin(self, phase: Phase, /) -> None:
        """Raise StepError inside `applied`, where the model has no weights to train."""
        self._refuse_applied(f"The {phase} of an optimizer step began")

    def _refuse_applied(self, what: str) -> None:
        if self._is_applied:
            raise StepError(f"{what} inside of EMA.applied(), where the model has the averages. Leave it before.")

    def on_step_end(self, report: StepReport, /) -> None:
        """Update the averages."""
        for fqn, average in () if report.skipped else self._averages.items():
            local_part(average).lerp_(local_part(self._weights[fqn]), 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averages inside the context, for an evaluation or an export. All ranks call it.

        Raises:
            StepError: an optimizer step has begun and not ended, or the averages are applied already.
        """
        self._refuse_applied("EMA.applied() was called")
        if wrap_state(self._root).step.is_open:
            raise StepError("EMA.applied() was called within an optimizer step. Call it between two of them.")
        trained = {fqn: weight.clone() for fqn, weight in self._weights.items()}
        self._write(self._averages)
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            self._write(trained)

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        reshard(self._root.modules())
        for fqn, weight in self._weights.items():
            local_part(weight).copy_(local_part(values[fqn]))
