"""Sums loss, squared gradient norm and the numbers of callbacks over the ranks, by one all-reduce per optimizer step.

[Note: One step late]
Some of the sums are read on the host: those that compare the ranks, and those of `StepSums`. On a CPU they are read at
once. On other devices the host would have to wait for the device, so it reads them in the next step. Only the device
type decides this, so all ranks read a sum in the same step.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective
from zeroamp.training.callbacks import Callbacks
from zeroamp.training.losses import LossSum
from zeroamp.training.micro_batches import MicroBatches
from zeroamp.training.rank_agreement import RankAgreement
from zeroamp.training.refused_arguments import no_gradient
from zeroamp.training.step_report import HostCopy
from zeroamp.training.step_sums import Receive, StepSums
from zeroamp.training.tensor_parallel_replicas import GradientsOfCopies
from zeroamp.training.unused_parameters import UnusedParameters
from zeroamp.wrapping.state import WrapState


class StepStatistics:
    """Sums the statistics of the optimizer steps of one `TrainStep` over the ranks."""

    def __init__(
        self,
        state: WrapState,
        micro_batches: MicroBatches,
        callbacks: Callbacks,
        agreement: RankAgreement | None,
        sums: Sequence[StepSums],
    ) -> None:
        """Store the arguments.

        Args:
            state: of the model.
            micro_batches: of the `TrainStep`.
            callbacks: whose `statistics` are summed too.
            agreement: compares the ranks; None on one rank.
            sums: numbers of further features.
        """
        self._state = state
        self._micro_batches = micro_batches
        self._callbacks = callbacks
        self._agreement = agreement
        self._sums = sums
        self._unused = UnusedParameters(state)
        self._copies: GradientsOfCopies | None = None  # made in the first step with a tensor axis
        self.is_late = state.mesh.device_type != "cpu"
        """Whether the host reads sums in the next step: see [Note: One step late]."""
        self._before: tuple[HostCopy, list[tuple[slice, Receive]]] | None = None  # of the previous step

    def sum_over_ranks(self, losses: Sequence[LossSum], *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum loss, squared gradients and the numbers of callbacks over the ranks by one all-reduce.

        This all-reduce is the only collective of an optimizer step besides those of the micro-batches. Gradients of
        parameters that no rank used are discarded.

        Args:
            losses: the sums of this rank's losses.
            scale: the loss scale of the gradients.

        Returns:
            The loss (see `StepReport.loss_tensor`), and the norm of the unscaled gradients before clipping: 0-D fp64.

        Raises:
            StepError: no parameter has a gradient, the ranks differ, or the ranks of a tensor axis have different
                gradients of copies.
        """
        replicated, arithmetic = self._micro_batches.replicated, self._micro_batches.arithmetic
        with self._micro_batches.noting("step"):
            self._micro_batches.finish()
            of_step = arithmetic.local(losses)
            copies = self._statistics_of_copies()
            of_callbacks = [(callback.statistics(), callback.on_statistics) for callback in self._callbacks]
            read = [] if self._agreement is None else [self._agreement.number(is_late=self.is_late)]
            read += [each for sums in self._sums for each in sums.collect()]
            has_gradient = bool(self._micro_batches.with_gradient()) or replicated.have_gradient()
        if not has_gradient:
            raise no_gradient()
        usage, of_replicated = self._unused.usage(), replicated.statistics(of_step.device)
        parts = [of_step, usage, *of_replicated, *copies]
        if on_host := [number for numbers, _ in (*of_callbacks, *read) for number in numbers]:
            # Built on the host and copied: to build it on the device, the host would wait for the whole backward.
            parts.append(torch.tensor(on_host, dtype=of_step.dtype).to(of_step.device, non_blocking=True))
        summed = torch.cat(parts)
        issued = IssuedCollective("all_reduce", summed, STEP, self._state.world)
        issue(lambda: dist.all_reduce(summed, group=self._state.world), issued, self._state.listeners)
        sizes = [len(of_step), len(usage), sum(map(len, of_replicated)), sum(map(len, copies)) + len(on_host)]
        of_step, usage, sums_of_replicated, others = torch.split(summed, sizes)
        self._unused.discard_gradients(usage)
        self._state.is_summed = True
        loss, squares = arithmetic.totals(of_step, losses)
        if of_replicated:
            squares = squares + replicated.set_gradients(sums_of_replicated, arithmetic.divide_factor())
        self._hand_out(others, bool(copies), of_callbacks, read)
        return loss, squares.sqrt() / scale

    def _hand_out(
        self,
        sums: torch.Tensor,
        has_copies: bool,
        of_callbacks: Sequence[tuple[Sequence[float], Callable[[torch.Tensor], None]]],
        read: Sequence[tuple[Sequence[float], Receive]],
    ) -> None:
        """Pass the sums to the functions that check or use them, first those that read them on the host.

        `sums` are those of the copies' gradients, if there are any, then of `of_callbacks`, then of `read`.
        """
        on_host: list[tuple[slice, Receive]] = []
        on_device: list[tuple[slice, Callable[[torch.Tensor], None]]] = []
        start = 0
        if has_copies and self._copies is not None:
            on_host.append((slice(0, start := 2), self._copies.compare))
        for numbers, on_statistics in of_callbacks:
            on_device.append((slice(start, start := start + len(numbers)), on_statistics))
        for numbers, receive in read:
            on_host.append((slice(start, start := start + len(numbers)), receive))
        reading = (HostCopy(sums), on_host) if on_host else None
        if self.is_late:
            reading, self._before = self._before, reading
        if reading is not None:
            values = reading[0].values()
            for part, receive in reading[1]:
                receive(values[part])
        for each in self._sums:
            each.num_sums += 1
        for part, on_statistics in on_device:
            if part.stop > part.start:
                on_statistics(sums[part])

    def _statistics_of_copies(self) -> list[torch.Tensor]:
        state = self._state
        if state.axes.tensor is None or state.axes.num_tensor == 1:
            return []
        if self._copies is None:
            self._copies = GradientsOfCopies(state.axes, state.axes.tensor, lambda: dict(state.root.named_parameters()))
        ignored = self._micro_batches.ignored
        return self._copies.statistics([each for each in self._micro_batches.with_gradient() if each not in ignored])
