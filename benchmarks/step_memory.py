"""Peak memory of one step of zeroamp beside FSDP2, DDP and DeepSpeed: one engine alive at a time.

    torchrun --nproc-per-node 2 -m benchmarks.step_memory [--model 3.7m] [--out FOLDER]

On a GPU it is the peak of torch's allocator in one step; the time of the steps is measured too. On a CPU it is the peak
of the bytes of all tensor storages, the smallest of a few steps, because gloo's thread may hold what it sent a moment
longer. It leaves out storages that torch makes without an op, and gloo's own buffers. Time is not measured, since the
tracking slows the steps down. DeepSpeed's numbers include its buckets, by default of 5e8 elements for any model.
"Planned" is the peak of `plan_run`, for the first rank on a GPU.

Without torchrun one rank runs alone. With --fake it is one of --world-size fake ranks, whose collectives move nothing:
its memory is that of a rank, and its time that of everything except communication. --warm-up steps precede --rounds.
"""

import gc
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import record
from benchmarks.peers.engine import Setup, UnavailableError, setup
from benchmarks.peers.engines import ENGINES, builder
from benchmarks.peers.options import Options
from benchmarks.peers.processes import start
from benchmarks.peers.timing import Spread, timed
from benchmarks.throughput import planned
from tests.measuring.allocated import Allocated
from zeroamp.policies.policy import Stage

MIB = 1024**2
STAGES: dict[str, Stage] = {"zeroamp 1": 1, "zeroamp 2": 2, "zeroamp 3": 3}
"""Engines that `plan_run` can plan -> their stage."""


class PeakOnCpu(Allocated):
    """The tests' tracker, which counts storages that are made while it is active."""

    def peak_bytes(self) -> int:
        """Return the most bytes since `reset_peak`."""
        return self.peak

    def held_bytes(self) -> int:
        """Return the bytes now."""
        return self.now


class PeakOnGpu(nullcontext[None]):
    """The numbers of torch's allocator."""

    def __init__(self) -> None:
        super().__init__()
        self._retries_before = self._retries()

    def release(self) -> None:
        """Return the allocator's unused memory, which building the engine has left, to the device."""
        gc.collect()
        torch.cuda.empty_cache()

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats()["num_alloc_retries"])

    def reset_peak(self) -> None:
        """Reset the peak."""
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Return the most bytes since `reset_peak`."""
        return torch.cuda.max_memory_allocated()

    def held_bytes(self) -> int:
        """Return the bytes now."""
        return torch.cuda.memory_allocated()

    def reserved(self) -> dict[str, Any]:
        """Return the bytes that the allocator has reserved on the device, and its retries.

        "reserved": the most since `reset_peak`; "reserved by stream": now; "retries": allocations that failed and were
        tried again after the caches were released.
        """
        by_stream: Counter[str] = Counter()
        for segment in torch.cuda.memory_snapshot():
            by_stream[str(segment["stream"])] += segment["total_size"]
        return {
            "reserved": torch.cuda.max_memory_reserved(),
            "reserved by stream": dict(by_stream),
            "retries": self._retries() - self._retries_before,
        }


def measure(options: Options, device: torch.device) -> dict[str, dict[str, Any]]:
    """Return engine -> its measured numbers, or the reason why there are none."""
    if options.compile and device.type == "cpu":
        raise SystemExit("--compile: the tracking of storages on a CPU prevents compilation. Leave it out.")
    ready = setup(options, device, dist.get_rank())
    measured = {}
    for name in options.engines or ENGINES:
        try:
            measured[name] = measure_one(name, ready)
            if name in STAGES:
                plan = planned(options, stage=STAGES[name], world_size=dist.get_world_size())
                measured[name]["planned"] = plan.memory.peak_bytes()
        except UnavailableError as error:
            measured[name] = {"reason": str(error)}
        except torch.OutOfMemoryError:
            if dist.get_world_size() > 1 and not options.fake:
                raise  # other ranks may wait in a collective
            measured[name] = {"reason": "out of memory"}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return measured


def measure_one(name: str, ready: Setup) -> dict[str, Any]:
    """Build an engine, take steps, and release it.

    Returns:
        "held", "peak": bytes between steps and at most in one, the largest of all ranks. On a GPU also "seconds" of
        every step, and what its allocator reserved on this rank: see `PeakOnGpu.reserved`.
    """
    options = ready.options
    watch = PeakOnGpu() if ready.device.type == "cuda" else PeakOnCpu()
    with watch:
        before = watch.held_bytes()
        engine = builder(name)(ready)
        if isinstance(watch, PeakOnGpu):
            watch.release()
        peaks, seconds = [], []
        for index in range(options.warm_up + options.rounds):
            watch.reset_peak()
            sample = timed(engine.step, ready.device)
            if index >= options.warm_up:
                peaks.append(watch.peak_bytes() - before)
                seconds.append(sample.seconds)
        reserved = watch.reserved() if isinstance(watch, PeakOnGpu) else {}
        found = torch.tensor([watch.held_bytes() - before, min(peaks)], device=ready.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    held, peak = found.tolist()
    return {"held": held, "peak": peak, **reserved, **({"seconds": seconds} if reserved else {})}


def rows(measured: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return a row per engine."""
    table = []
    for name, found in measured.items():
        row = {"engine": name}
        if "reason" in found:
            row["peak, MiB"] = found["reason"]
        else:
            row["peak, MiB"] = f"{found['peak'] / MIB:,.1f}"
            row["between steps, MiB"] = f"{found['held'] / MIB:,.1f}"
        if "planned" in found:
            row["planned, MiB"] = f"{found['planned'] / MIB:,.1f}"
        if "reserved" in found:
            row["reserved, MiB"] = f"{found['reserved'] / MIB:,.1f}"
            row["allocations tried again"] = str(found["retries"])
        if "seconds" in found:
            spread = Spread.of(found["seconds"])
            row["step, ms"] = f"{spread.middle * 1e3:.1f} ({spread.lower * 1e3:.1f} to {spread.upper * 1e3:.1f})"
        table.append(row)
    return table


def main() -> None:
    options = Options.from_command_line(__doc__, rounds=5, warm_up=2)
    device = start(options)
    measured = measure(options, device)
    if dist.get_rank() == 0:
        what = "allocated by torch" if device.type == "cuda" else "in tensor storages"
        explained = f"Most MiB (2^20 bytes) {what} in a step, of the rank that had most; one engine alive at a time."
        if any(name.startswith("DeepSpeed") and "peak" in found for name, found in measured.items()):
            explained += " DeepSpeed's include its buckets, by default of 5e8 elements for any model."
        body = "\n\n".join(
            [*record.head("benchmarks.step_memory", options, device), explained, record.markdown(rows(measured))]
        )
        print(body)
        if options.out is not None:
            values = {"versions": record.versions(), "engines": measured}
            record.write(
                options.out, title=f"Memory of a step, {options.model}", body=body, name="steps", values=values
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
