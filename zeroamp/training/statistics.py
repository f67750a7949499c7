"""Sums loss, squared gradient norm and the numbers of callbacks over the ranks, by one all-reduce per optimizer step.

[Note: When the host reads the sums]
The sums decide whether the step updates parameters. They are on the device, and the host should not wait for them
before it has launched the update. So the sums are used in two ways. `Summed.found_inf` is a number on the device: 1 if
all ranks must skip the update. `StepStatistics.settle` reads the sums on the host, and raises the step's errors.
`TrainStep` calls `settle` after the update if the optimizers read `found_inf`, else before the update.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from zeroamp.hooks.collectives.issued import issue
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective
from zeroamp.training.callbacks import Callback, Callbacks, HostReader
from zeroamp.training.checks import no_gradient
from zeroamp.training.copies import GradientsOfCopies
from zeroamp.training.host_copy import HostCopy
from zeroamp.training.losses import LossSum
from zeroamp.training.micro_batches import MicroBatches
from zeroamp.training.unused_parameters import UnusedParameters
from zeroamp.wrapping.state import WrapState


class Slice(NamedTuple):
    """The part of all sums that belongs to one `HostReader`: indices `start` to `stop` - 1."""

    reader: HostReader
    read: Callable[[Sequence[float]], None]
    start: int
    stop: int


@dataclass(slots=True)
class Summed:
    """The sums over the ranks of one optimizer step."""

    loss: torch.Tensor
    """0-D fp64: see `StepReport.loss_tensor`."""
    norm: torch.Tensor
    """0-D fp64: unscaled, before clipping."""
    statistics: torch.Tensor
    """1-D fp64: all sums."""
    slices: list[Slice]
    """The parts that the host reads."""
    to_callbacks: list[Callable[[], None]]
    """Functions that pass the sums to callbacks, as tensors on the device."""
    reads_norm: bool
    """Whether the host reads the norm, to skip the step if the norm is not finite."""
    of_copies: torch.Tensor | None = None
    """The sums of `GradientsOfCopies.statistics`, 1-D fp64 of 2 elements. None without a tensor axis."""
    host: HostCopy | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.slices or self.reads_norm:
            results = [self.loss, self.norm, self.norm.float().double()]
            self.host = HostCopy(torch.cat([self.statistics, torch.stack(results)]))

    @property
    def is_awaited(self) -> bool:
        """Whether the host reads the norm, or the sums of a reader, in this step."""
        return self.reads_norm or any(not each.reader.is_late for each in self.slices)

    def found_inf(self) -> torch.Tensor:
        """Return 1 if all ranks must skip the update, else 0: 0-D fp32, on the device, the same on all ranks."""
        stops = [each.reader.stops(self.statistics[each.start : each.stop]) for each in self.slices]
        flags = [stop for stop in stops if stop is not None]
        if self.reads_norm:
            flags.append(~torch.isfinite(self.norm))
        return torch.stack(flags).any().float() if flags else torch.zeros((), device=self.norm.device)

    def norm_on_host(self) -> float:
        """Return the norm as a number. Waits for the device."""
        return self._on_host()[-2]

    def loss_and_norm(self) -> Callable[[], tuple[float, float]] | None:
        """Return a function that waits for the copy and returns loss and fp32 norm. None if the host has no copy."""
        return None if self.host is None else partial(_loss_and_norm, self.host)

    def read(self, each: Slice) -> None:
        """Pass a reader its sums. Waits for the device."""
        each.read(self._on_host()[each.start : each.stop])

    def _on_host(self) -> Sequence[float]:
        if self.host is None:
            raise AssertionError("expected the sums to be copied to the host")
        return self.host.values()


def _loss_and_norm(host: HostCopy) -> tuple[float, float]:
    numbers = host.values()
    return numbers[-3], numbers[-1]


class StepStatistics:
    """Sums the statistics of the optimizer steps of one `TrainStep` over the ranks."""

    def __init__(
        self,
        state: WrapState,
        micro_batches: MicroBatches,
        callbacks: Callbacks,
    ) -> None:
        self._state = state
        self._micro_batches = micro_batches
        self._callbacks = callbacks
        self._unused = UnusedParameters(state)
        self._copies: GradientsOfCopies | None = None  # made in the first step with a tensor axis
        self._before: Summed | None = None  # of the previous step, which late readers read in this one

    def sum_over_ranks(
        self, losses: Sequence[LossSum], *, scale: float, reads_norm: bool, prepare: Callable[[], None]
    ) -> Summed:
        """Sum loss, squared gradients and the numbers of callbacks over the ranks by one all-reduce.

        This all-reduce is the only collective of an optimizer step besides those of the micro-batches. Gradients of
        parameters that no rank used are discarded.

        Args:
            losses: the sums of this rank's losses.
            scale: the loss scale of the gradients.
            reads_norm: whether the host will read the norm.
            prepare: called when this rank's gradients are complete, before the all-reduce.

        Raises:
            StepError: no parameter has a gradient.
        """
        with self._micro_batches.noting("step"):
            self._micro_batches.finish()
            statistics = self._micro_batches.arithmetic.local(losses)
            num_first = len(statistics)
            of_callbacks = [(callback, callback.statistics()) for callback in self._callbacks.with_statistics()]
            has_gradient = bool(self._micro_batches.with_gradient()) or self._micro_batches.replicated.have_gradient()
            copies = self._statistics_of_copies()
            prepare()
        if not has_gradient:
            raise no_gradient()
        more = [number for _, numbers in of_callbacks for number in numbers]
        # Built on the host and copied: to build it on the device, the host would wait for the whole backward.
        of_all = torch.tensor(more, dtype=statistics.dtype).to(statistics.device, non_blocking=True) if more else None
        usage, replicated = self._unused.usage(), self._micro_batches.replicated
        own = [statistics, usage, *replicated.statistics(statistics.device)]
        num_own = sum(map(len, own))
        has_replicated = len(own) > 2
        own += copies
        statistics = torch.cat([*own, *([] if of_all is None else [of_all])])
        issued = IssuedCollective("all_reduce", statistics, STEP, self._state.world)
        issue(lambda: dist.all_reduce(statistics, group=self._state.world), issued, self._state.listeners)
        start = sum(map(len, own))
        slices, to_callbacks = _parts_of(statistics, start, of_callbacks)
        self._unused.discard_gradients(statistics[num_first : num_first + len(usage)])
        self._state.is_summed = True
        arithmetic = self._micro_batches.arithmetic
        loss, squares = arithmetic.totals(statistics[:num_first], losses)
        if has_replicated:
            of_replicated = statistics[num_first + len(usage) : num_own]
            squares = squares + replicated.set_gradients(of_replicated, arithmetic.divide_factor())
        of_copies = statistics[num_own:start] if copies else None
        return Summed(loss, squares.sqrt() / scale, statistics, slices, to_callbacks, reads_norm, of_copies)

    def _statistics_of_copies(self) -> list[torch.Tensor]:
        state = self._state
        if state.axes.tensor is None or state.axes.num_tensor == 1:
            return []
        if self._copies is None:
            self._copies = GradientsOfCopies(state.axes, state.axes.tensor, lambda: dict(state.root.named_parameters()))
        ignored = self._micro_batches.ignored
        return self._copies.statistics([each for each in self._micro_batches.with_gradient() if each not in ignored])

    def settle(self, summed: Summed) -> None:
        """Pass the readers their sums: those of this step, and to late readers those of the previous step.

        Raises:
            StepError: the ranks differ, or the ranks of a tensor axis have different gradients of copies.
        """
        if self._copies is not None and summed.of_copies is not None:
            self._copies.compare(summed.of_copies)
        for each in summed.slices:
            if not each.reader.is_late:
                summed.read(each)
        late = [each for each in summed.slices if each.reader.is_late]
        before, self._before = self._before, summed if late else None
        if before is not None:
            for each in before.slices:
                if each.reader.is_late:
                    before.read(each)
        for each in summed.slices:
            each.reader.on_settled()


def _parts_of(
    statistics: torch.Tensor, start: int, of_callbacks: Sequence[tuple[Callback, Sequence[float]]]
) -> tuple[list[Slice], list[Callable[[], None]]]:
    """Return the parts of the sums that the host reads, and the calls of callbacks that take sums on the device."""
    slices: list[Slice] = []
    calls: list[Callable[[], None]] = []
    for callback, numbers in of_callbacks:
        stop = start + len(numbers)
        if isinstance(callback, HostReader):
            slices.append(Slice(callback, callback.reader(), start, stop))
        elif numbers:
            calls.append(partial(callback.on_statistics, statistics[start:stop]))
        start = stop
    return slices, calls
