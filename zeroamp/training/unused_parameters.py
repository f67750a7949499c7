"""Finds the parameters that no rank used in an optimizer step. Their `grad` stays None, as in one process.

[Note: One number for three parameters]
Each rank records which parameters had a gradient on it. If only some ranks used a parameter, the other ranks add zeros
to its mean gradient. If no rank used it, its gradient is discarded. So the step's all-reduce also counts the ranks that
used each parameter. Each fp64 number has three counts of 17 bits, for fewer than 2^17 ranks. Only a rank with unused
parameters reads the counts.
"""

import logging

import torch
from torch import nn

from zeroamp.planning.groups import PARAMETERS_PER_NUMBER
from zeroamp.planning.mesh import device_of, is_first_rank
from zeroamp.policies.errors import some_of
from zeroamp.wrapping.state import WrapState

logger = logging.getLogger("zeroamp")

_BASE = 2**17


class UnusedParameters:
    """Finds the parameters that no rank used, and discards their gradients. One per `TrainStep`."""

    def __init__(self, state: WrapState) -> None:
        self._state = state
        self._used: list[frozenset[int]] | None = None  # by this rank in the last optimizer step, per group
        self._unused: dict[nn.Parameter, int] = {}  # not used by this rank -> position among all parameters
        self._sent = torch.empty(0)
        self._has_logged = False

    def usage(self) -> torch.Tensor:
        """Return this rank's part of the counts: 1-D fp64, on the device. See [Note: One number for three parameters].

        If the usage is the same as in the step before, nothing is built or copied to the device.
        """
        used = [group.used for group in self._state.gradients]
        if used != self._used:
            self._used = used
            self._send()
        return self._sent

    def _send(self) -> None:
        groups = zip(self._state.gradients, self._used or (), strict=True)
        usage = [(p, index in used) for group, used in groups for index, p in enumerate(group.parameters)]
        self._unused = {parameter: index for index, (parameter, is_used) in enumerate(usage) if not is_used}
        starts = range(0, len(usage), PARAMETERS_PER_NUMBER)
        parts = [usage[start : start + PARAMETERS_PER_NUMBER] for start in starts]
        numbers = [sum(is_used * _BASE**place for place, (_, is_used) in enumerate(part)) for part in parts]
        self._sent = torch.tensor(numbers, dtype=torch.float64, device=device_of(self._state.mesh))

    def discard_gradients(self, sums: torch.Tensor) -> None:
        """Set `grad` to None on the parameters that no rank used. `sums` are the counts over all ranks, 1-D fp64.

        Waits for the device if this rank did not use a parameter whose group was reduced.
        """
        with_gradient = {parameter: index for parameter, index in self._unused.items() if parameter.grad is not None}
        if with_gradient:
            numbers = [int(number) for number in sums.tolist()]
            for parameter, index in with_gradient.items():
                place, offset = divmod(index, PARAMETERS_PER_NUMBER)
                if numbers[place] // _BASE**offset % _BASE == 0:
                    parameter.grad = None
        if not self._has_logged and any(p.requires_grad and p.grad is None for p in self._unused):
            self._has_logged = True
            self._log()

    def _log(self) -> None:
        if is_first_rank(self._state.axes.whole):
            named = self._state.root.named_parameters()
            names = [fqn for fqn, p in named if p in self._unused and p.requires_grad and p.grad is None]
            logger.warning(
                "%d trainable parameters had no gradient on any rank in an optimizer step: %s. They keep grad None and "
                "are not updated in such a step. This is logged once.",
                *(len(names), some_of(names)),
            )
