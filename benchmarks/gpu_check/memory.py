"""Part 7: the memory that a step allocates and reserves, beside the prediction of `plan`.

LLaMA-3 8B with activation checkpointing on one of 8 fake ranks, whose collectives move nothing. On CUDA the numbers are
those of torch's allocator. On a CPU other kernels run than `plan` counts, so the measured peak may be below the planned
one, but not above it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

from benchmarks import step_memory
from benchmarks.gpu_check import ranks
from benchmarks.gpu_check.faults import planted
from benchmarks.gpu_check.verdict import Place, Result
from benchmarks.peers.engine import setup
from benchmarks.peers.options import Options
from benchmarks.throughput import planned
from zeroamp.dry_run import run_plan

WORLD_SIZE = 8
ABOVE, BELOW = 1.03, 0.8
"""Limits of measured peak / planned peak. The plan does not count the workspaces of kernels."""
MIB = 2**20
LARGE = Options(
    model="8b", batch=1, length=4096, checkpointing=True, fake=True, world_size=WORLD_SIZE, rounds=3, warm_up=2
)
SMALL = replace(LARGE, model="3.7m", length=64)
SMALL_STAGES = (2, 3)


def run(place: Place) -> Result:
    """Measure and plan a step at stage 3; with `place.small` also at stage 2."""
    options = SMALL if place.small else LARGE
    rows, failures = [], []
    for stage in SMALL_STAGES if place.small else (3,):
        with ranks.fake_ranks(WORLD_SIZE):
            ready = setup(options, place.device, 0)
            with _ranks_of(place):
                plan = planned(options, stage=stage, world_size=WORLD_SIZE)
            planted("memory", place.device, plan.memory.peak_bytes() // 2)
            found = step_memory.measure_one(f"zeroamp {stage}", ready)
        ratio = found["peak"] / plan.memory.peak_bytes()
        row = {
            "stage": stage,
            "planned peak, MiB": f"{plan.memory.peak_bytes() / MIB:,.1f}",
            "allocated, MiB": f"{found['peak'] / MIB:,.1f}",
            "allocated / planned": f"{ratio:.3f}",
            "between steps, MiB": f"{found['held'] / MIB:,.1f}",
        }
        if place.on_cuda:
            row |= {
                "reserved, MiB": f"{found['reserved'] / MIB:,.1f}",
                "allocations tried again": str(found["retries"]),
            }
        rows.append(row)
        failures += wrong(stage, ratio, found.get("retries", 0), place)
    last = rows[-1]
    peaks = f"{last['allocated, MiB']} MiB allocated of {last['planned peak, MiB']} planned"
    summary = f"stage 3: {peaks} ({last['allocated / planned']})"
    if place.on_cuda:
        summary += f", {last['reserved, MiB']} MiB reserved"
    return Result.of(
        failures,
        summary,
        not_measured="" if place.on_cuda else "reserved memory (no CUDA)",
        tables={f"Memory of a step, {options.described()}, one of {WORLD_SIZE} ranks": rows},
    )


@contextmanager
def _ranks_of(place: Place) -> Iterator[None]:
    """Plan memory for this device type: on a CPU, receive buffers are released at the end of each backward."""
    on_cpu = place.device.type == "cpu"
    timeline = partial(run_plan.memory_timeline, on_cpu=on_cpu)
    with mock.patch.object(run_plan, "memory_timeline", timeline):
        yield


def wrong(stage: int, ratio: float, retries: int, place: Place) -> list[str]:
    """Return the failures: a peak far from the planned one, or an allocator that ran out of memory."""
    failures = []
    if not (BELOW if place.on_cuda else 0) <= ratio <= ABOVE:
        failures.append(f"stage {stage}: the measured peak is {ratio:.3f} of the planned one")
    if retries:
        failures.append(f"stage {stage}: the allocator released its caches {retries} times")
    return failures
