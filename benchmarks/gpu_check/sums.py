"""Part 5: the sum over ranks: the bits of the Triton kernel and of the loop, and the memory bandwidth of both.

The input is one layer of LLaMA-3 8B in bf16 as a rank receives it from N ranks: N rows of one shard. The kernel reads
each row once and writes the sum in fp32: 2 N + 4 bytes per element of the shard. Its bandwidth is compared with that of
a plain copy on the same device.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_check.faults import planted
from benchmarks.gpu_check.verdict import Place, Result
from tests.oracles.one_process import tree
from zeroamp.hooks.collectives import tree_sum as module

LAYER = 218_112_000
"""Elements of a layer of LLaMA-3 8B."""
NUM_RANKS = (2, 3, 8, 64, 1024)
LEAST_OF_COPY = 0.6
"""Fraction of a plain copy's bandwidth that the kernel must reach with 8 rows or more. An assumption, not measured."""
_REPEATS = 15


def run(place: Place) -> Result:
    """Sum the rows of each number of ranks by kernel and loop; on CUDA also measure the time of both."""
    rows, failures, speeds = [], [], []
    kernel = module._kernel() if place.on_cuda else None
    if place.on_cuda and kernel is None:
        failures.append("there is no Triton, so the sum runs as a loop of kernels")
    copied = copy_bandwidth(place) if place.on_cuda else 0.0
    for num_rows in NUM_RANKS:
        numel = (LAYER if not place.small else 2_000_000) // num_rows // 8 * 8
        for dtype in (torch.bfloat16, torch.float32) if num_rows == 8 else (torch.bfloat16,):
            received = some_rows(num_rows, numel, dtype, place)
            row: dict[str, Any] = {"ranks": num_rows, "elements": numel, "dtype": str(dtype).removeprefix("torch.")}
            # Divided by a tensor: by a number, CUDA would multiply by its inverse.
            expected = tree(list(received)) / torch.full((numel,), float(num_rows), device=place.device)
            sums: dict[str, Callable[..., Any]] = {"loop": module._loop} | ({"kernel": kernel} if kernel else {})
            for name, function in sums.items():
                total = torch.empty(numel, device=place.device)
                function(received, total, num_rows)
                planted("order of the sum", received, total, num_rows)
                row[f"bits of the {name}"] = "the tree's" if torch.equal(total, expected) else "OTHERS"
                if row[f"bits of the {name}"] == "OTHERS":
                    differing = float((total != expected).float().mean())
                    failures.append(f"{num_rows} rows of {row['dtype']}: the {name} differs in {differing:.2%}")
                if place.on_cuda:
                    row |= _speed(name, function, received, total, copied)
            if kernel and dtype == torch.bfloat16:
                speeds.append(f"{num_rows}: {row['kernel / copy']:.0%}")
                if num_rows >= 8 and not place.small and row["kernel / copy"] < LEAST_OF_COPY:
                    failures.append(
                        f"{num_rows} rows: the kernel reaches {row['kernel / copy']:.0%} of a copy's bandwidth"
                    )
            rows.append(row)
    failures += _odd_sizes(kernel or module._loop, place)
    summary = f"bits of the tree for {', '.join(map(str, NUM_RANKS))} ranks"
    if speeds:
        summary += f"; of a copy's {copied:.0f} GB/s: {', '.join(speeds)}"
    return Result.of(
        failures,
        summary,
        not_measured="" if place.on_cuda else "the Triton kernel and its bandwidth (no CUDA)",
        tables={"The sum over ranks of one layer of LLaMA-3 8B": rows},
        values={"copy_gb_per_s": copied},
    )


def _odd_sizes(function: Callable[..., Any], place: Place) -> list[str]:
    """Return the sizes at which bits differ. They include unaligned and masked loads, and sums of several launches."""
    wrong = []
    for num_rows in (1, 2, 5, 8, 17, 64, 65, 130):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for numel in (1, 1003, 4096):
                rows = some_rows(num_rows, numel, dtype, place)
                total = torch.empty(numel, device=place.device)
                for divide_by in (1, 3):
                    function(rows, total, divide_by)
                    if not torch.equal(total, tree(list(rows)) / torch.full_like(total, divide_by)):
                        wrong.append(f"{num_rows} rows of {numel} in {dtype}, divided by {divide_by}: other bits")
    return wrong


def some_rows(num_rows: int, numel: int, dtype: torch.dtype, place: Place) -> torch.Tensor:
    """Return rows with elements of very different magnitudes, so that their sum depends on the order."""
    generator = torch.Generator(place.device).manual_seed(num_rows)
    rows = torch.empty(num_rows, numel, dtype=dtype, device=place.device)
    for row in rows:  # one by one: fp32 copies of all rows at once would not fit into memory
        drawn = torch.randn(numel, generator=generator, device=place.device)
        sizes = torch.randint(-6, 6, (numel,), generator=generator, device=place.device)
        row.copy_(torch.ldexp(drawn, sizes))
    return rows


def copy_bandwidth(place: Place) -> float:
    """Return the bandwidth of a copy on the device in GB/s (1e9 bytes), counting bytes read and bytes written."""
    source = torch.zeros(2**30, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / 1e9 / _seconds(lambda: target.copy_(source))


def _speed(
    name: str, function: Callable[..., Any], rows: torch.Tensor, total: torch.Tensor, copied: float
) -> dict[str, Any]:
    seconds = _seconds(lambda: function(rows, total, len(rows)))
    rate = (rows.nbytes + total.nbytes) / 1e9 / seconds  # of the bytes that one pass needs: the loop moves more
    few, few_total = rows[:, :1024].contiguous(), total[:1024]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        function(few, few_total, len(rows))
    host = (time.perf_counter() - begin) / _REPEATS
    torch.cuda.synchronize()
    return {
        f"{name}, ms": round(seconds * 1e3, 3),
        f"{name}, GB/s": round(rate, 1),
        f"{name} / copy": round(rate / copied, 3),
        f"{name}, host us": round(host * 1e6, 1),
    }


def _seconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call on the GPU."""
    for _ in range(3):
        call()
    times = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
