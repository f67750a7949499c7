"""Rounds of steps, all engines in turn, in the same processes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist

from benchmarks.peers.processes import synchronize


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of one engine on this rank."""

    seconds: float
    cpu_seconds: float
    """CPU time of this process, all threads."""

    def as_json(self) -> dict[str, float]:
        """Return the fields, to the microsecond."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    lower: float
    middle: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return median and quartiles of two values or more."""
        lower, _, upper = quantiles(values, n=4)
        return cls(lower, median(values), upper)


def rounds(
    steps: Mapping[str, Callable[[], torch.Tensor]], device: torch.device, *, num_rounds: int, warm_up: int
) -> dict[str, list[Sample]]:
    """Return engine -> its sample of every round after the first `warm_up` rounds.

    A round takes one step of each engine, in an order that rotates, so that other load on the machine affects all
    equally. Ranks begin each step together, and a step lasts until the device has finished it.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(warm_up + num_rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            sample = timed(steps[name], device)
            if index >= warm_up:
                samples[name].append(sample)
    return samples


def timed(step: Callable[[], torch.Tensor], device: torch.device) -> Sample:
    """Take one step and measure it."""
    synchronize(device)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    step()
    synchronize(device)
    return Sample(time.perf_counter() - begin, time.process_time() - cpu_begin)


def ratios(values: Sequence[float], bases: Sequence[float]) -> Spread:
    """Return the spread of the ratios of a step's time to the base's time in the same round."""
    return Spread.of([mine / base for mine, base in zip(values, bases, strict=True)])
