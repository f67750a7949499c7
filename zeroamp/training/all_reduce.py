"""`StepAllReduce`: the one all-reduce of an optimizer step, which sums loss, squared norm and more over the ranks.

It has these parts, in this order, all fp64:

| part | numbers | who uses the sums |
|---|---|---|
| loss and squared norm | 2 (more with `zeroamp.reproducible`) | `StepArithmetic.totals` |
| which parameters this rank used | 1 per sharded parameter | `unused_parameters.py` |
| gradients of 0-D parameters | 2 per parameter | `ReplicatedGradients` |
| gradients of a tensor axis' copies | 2, with a tensor axis only | `GradientsOfCopies` |
| what this rank did | 1, on several ranks only | `RankAgreement` |
| statistics of callbacks | as they return | the function of each callback |

[Note: One step late]
The host reads the last three. On a CPU it reads them at once. On other devices the host would have to wait for the
device, so it reads them in the next step. Only the device type decides this, so all ranks read a sum in the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective
from zeroamp.hooks.tensors import HostCopy
from zeroamp.training.arithmetic import StepArithmetic
from zeroamp.training.callbacks import Callbacks, Receive
from zeroamp.training.gradients import Gradients
from zeroamp.training.rank_agreement import RankAgreement
from zeroamp.training.refused_arguments import no_gradient
from zeroamp.wrapping.state import WrapState
from zeroamp.wrapping.step_state import LossSum
from zeroamp.wrapping.unused_parameters import SentNumbers, discard_unused, log_without_gradient, numbers_of

if TYPE_CHECKING:
    from zeroamp.meshes.tensor_parallel_replicas import GradientsOfCopies

Reader = tuple[int, Receive]
"""How many sums the host reads for a function, and the function."""


@dataclass(slots=True)
class OwnNumbers:
    """The numbers of one rank in an optimizer step."""

    losses: Sequence[LossSum]
    of_step: torch.Tensor
    """Loss and squared norm: see `StepArithmetic.local`."""
    of_copies: list[torch.Tensor]
    on_host: list[float]
    """The numbers that are not on the device yet."""
    readers: list[Reader]
    """The functions that get the sums of the last two."""


class StepAllReduce:
    """Sums the numbers of the optimizer steps of one `TrainStep` over the ranks."""

    agreement: RankAgreement | None = None
    """Compares the ranks. None on one rank."""

    def __init__(
        self, state: WrapState, gradients: Gradients, arithmetic: StepArithmetic, callbacks: Callbacks
    ) -> None:
        self._state = state
        self._gradients = gradients
        self._arithmetic = arithmetic
        self._callbacks = callbacks
        self._usage = SentNumbers(torch.float64)
        self._has_logged = False  # parameters without a gradient
        self._copies: GradientsOfCopies | None = None  # made in the first step with a tensor axis
        self.is_late = state.mesh.device_type != "cpu"
        """Whether the host reads sums in the next step: see [Note: One step late]."""
        self._before: tuple[HostCopy, list[Reader]] | None = None  # of the previous step

    def own_numbers(self, losses: Sequence[LossSum]) -> OwnNumbers:
        """Return this rank's numbers, without a collective. `losses`: the sums of its losses."""
        return OwnNumbers(losses, self._arithmetic.local(losses), *self._read_on_host())

    def run(self, own: OwnNumbers, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the parts over the ranks. This is the only collective of a step besides those of the micro-batches.

        Gradients of parameters that no rank used are discarded.

        Args:
            own: this rank's numbers.
            scale: the factor by which the gradients are scaled.

        Returns:
            The loss (see `StepReport.loss_tensor`), and the norm of the unscaled gradients before clipping: 0-D fp64.

        Raises:
            StepError: no parameter has a gradient, the ranks differ, or the ranks of a tensor axis have different
                gradients of copies.
        """
        num_present = len(self._gradients.present())
        if num_present == 0:
            self.refuse_no_gradient()
        of_step, replicated = own.of_step, self._gradients.replicated
        used, unused = numbers_of(self._state.gradients)
        usage = self._usage.on_device(self._state.mesh, used)
        of_replicated = [] if replicated is None else replicated.statistics(of_step.device)
        parts = [of_step, usage, *of_replicated, *own.of_copies]
        if own.on_host:
            # Built on the host and copied: to build it on the device, the host would wait for the whole backward.
            on_host = torch.tensor(own.on_host, dtype=of_step.dtype, device="cpu")
            parts.append(on_host.to(of_step.device, non_blocking=True))
        summed = torch.cat(parts)
        issued = IssuedCollective("all_reduce", summed, STEP, self._state.world)
        issue(lambda: dist.all_reduce(summed, group=self._state.world), issued, self._state.listeners)
        sizes = [len(of_step), len(usage), sum(map(len, of_replicated)), sum(num for num, _ in own.readers)]
        of_step, usage, sums_of_replicated, to_read = torch.split(summed, sizes)
        discard_unused(unused, usage)
        if not self._has_logged and (unused or num_present < len(self._gradients.parameters)):
            self._has_logged = log_without_gradient(self._state, self._gradients.parameters)
        loss, squares = self._arithmetic.totals(of_step, own.losses)
        if replicated is not None:
            squares = squares + replicated.set_gradients(sums_of_replicated, self._arithmetic.divide_factor())
        self._hand_out(to_read, own.readers)
        return loss, squares.sqrt() / scale

    def refuse_no_gradient(self) -> None:
        """Raise StepError, because no parameter of this rank has a gradient."""
        raise no_gradient()

    def _read_on_host(self) -> tuple[list[torch.Tensor], list[float], list[Reader]]:
        """Return the numbers whose sums the host reads: those on the device, those on the host, and their functions."""
        of_copies, readers = self._of_copies()
        on_host: list[float] = []
        own = [] if self.agreement is None else [self.agreement.number(is_late=self.is_late)]
        for numbers, receive in (*own, *(callback.statistics() for callback in self._callbacks.all())):
            on_host.extend(numbers)
            readers.append((len(numbers), receive))
        return of_copies, on_host, readers

    def _hand_out(self, sums: torch.Tensor, readers: list[Reader]) -> None:
        """Pass the sums to the functions that read them on the host: see [Note: One step late]."""
        values: list[float] = []
        if self.is_late:
            before, self._before = self._before, (HostCopy(sums), readers) if readers else None
            values, readers = ([], []) if before is None else (before[0].values(), before[1])
        elif readers:
            values = sums.tolist()
        start = 0
        for num, receive in readers:
            receive(values[start : start + num])
            start += num

    def _of_copies(self) -> tuple[list[torch.Tensor], list[Reader]]:
        state = self._state
        if self._copies is None:
            if state.axes.tensor is None or state.axes.num_tensor == 1:
                return [], []
            from zeroamp.meshes.tensor_parallel_replicas import GradientsOfCopies

            self._copies = GradientsOfCopies(state.axes, state.axes.tensor, lambda: dict(state.root.named_parameters()))
        ignored = self._gradients.ignored
        numbers = self._copies.statistics([p for p in self._gradients.present() if p not in ignored])
        return numbers, [(sum(map(len, numbers)), self._copies.compare)]
