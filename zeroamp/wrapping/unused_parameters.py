"""Finds the parameters that no rank used in an optimizer step. Their `grad` becomes None, as in one process.

[Note: One number per parameter]
If only some ranks used a parameter, the other ranks add zeros to its mean gradient, which stays. If no rank used it,
its gradient is zeros, and weight decay or momentum would change it. So each rank sends one number per parameter: 0 if
its gradient is zeros only on this rank (`GroupGradients.filled`), else 1. `TrainStep` sums these numbers in the step's
all-reduce, and the hook of other loops reduces them by maximum: the result is 0 for a parameter that no rank used. Only
a rank with such zeros reads the result, so the other hosts do not wait for their devices.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks.group_gradients import GroupGradients
from zeroamp.planning.mesh import device_of, is_first_rank
from zeroamp.policies.errors import some_of
from zeroamp.wrapping.state import WrapState

logger = logging.getLogger("zeroamp")


@dataclass(slots=True)
class SentNumbers:
    """Small integers that a rank sends in each optimizer step. They are copied to the device after a change only."""

    dtype: torch.dtype
    _values: bytes | None = None
    _sent: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def on_device(self, mesh: DeviceMesh, values: bytes) -> torch.Tensor:
        """Return one element per byte of `values`, 1-D, on the device of a mesh. The tensor must not be changed."""
        if values != self._values:
            self._values, self._sent = values, torch.tensor(list(values), dtype=self.dtype, device=device_of(mesh))
        return self._sent


def numbers_of(groups: Iterable[GroupGradients]) -> tuple[bytes, dict[int, nn.Parameter]]:
    """Return this rank's numbers, and {position: parameter} of those that are 0: [Note: One number per parameter]."""
    num_parameters, unused = 0, {}
    for group in groups:
        for index in group.filled:
            parameter = group.group.parameters[index].sharded
            if parameter.grad is not None:
                unused[num_parameters + index] = parameter
        num_parameters += len(group.group.parameters)
    numbers = bytearray(b"\1" * num_parameters)
    for position in unused:
        numbers[position] = 0
    return bytes(numbers), unused


def discard_unused(unused: Mapping[int, nn.Parameter], reduced: torch.Tensor | bytes) -> None:
    """Set `grad` to None on the parameters that no rank used. Waits for the device if there are `unused` ones.

    `unused` is what `numbers_of` returned, and `reduced` the sums or the maxima of its numbers over the ranks.
    """
    if unused:
        by_ranks: Sequence[float] = reduced.tolist() if isinstance(reduced, torch.Tensor) else reduced
        for position, parameter in unused.items():
            if by_ranks[position] == 0:
                parameter.grad = None


def log_without_gradient(state: WrapState, parameters: Iterable[nn.Parameter]) -> bool:
    """Log, on the first rank, the trainable parameters of groups that have no gradient. Return whether there are any.

    `parameters`: of the model, while it is sharded.
    """
    without = {parameter for parameter in parameters if parameter.grad is None and parameter.requires_grad}
    if without:
        without &= {parameter for group in state.gradients for parameter in group.parameters}
    if without and is_first_rank(state.axes.whole):
        names = [fqn for fqn, parameter in state.root.named_parameters() if parameter in without]
        logger.warning(
            "%d trainable parameters had no gradient on any rank in an optimizer step: %s. They keep grad None and "
            "are not updated in such a step. This is logged once.",
            *(len(names), some_of(names)),
        )
    return bool(without)
