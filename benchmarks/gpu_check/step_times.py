"""Part 6: step time, tokens/s and MFU beside FSDP2 in bf16, FSDP2 under autocast, and DDP, in paired steps.

The 1b shape on one rank, and on one of 64 fake ranks, whose collectives move nothing; zeroamp's sum then has 64 rows.
`benchmarks.step_time` takes the steps. `make bench-gpu` measures more shapes, more rounds and compiled blocks.

zeroamp at stage 3 must reach the loss of FSDP2 under autocast within `SAME_LOSS`. On CUDA its step may take at most
`MOST` times the step of FSDP2 under autocast, which all-gathers and reduces in fp32.
"""

import gc
import math
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks import step_time
from benchmarks.gpu_check import ranks
from benchmarks.gpu_check.faults import planted
from benchmarks.gpu_check.verdict import Place, Result
from benchmarks.peers.options import Options
from benchmarks.peers.timing import ratios
from benchmarks.throughput import mfu, tokens_per_step

OURS, THEIRS = "zeroamp 3", "FSDP2 autocast reshard"
ENGINES = (OURS, "FSDP2 bf16 reshard", THEIRS, "DDP autocast")
MOST = 1.1
"""Largest ratio of step times. The lower quartile of the ratios of the rounds must not exceed it."""
SAME_LOSS = 1e-2
"""Largest relative difference: the two engines round gradients and parameters at different places."""
SMALL = Options(model="tiny", batch=2, length=16, rounds=3, warm_up=1, engines=ENGINES)
LARGE = Options(model="1b", batch=2, length=2048, rounds=16, warm_up=3, engines=ENGINES)


def run(place: Place) -> Result:
    """Measure and compare."""
    options = SMALL if place.small else LARGE
    fake = replace(options, fake=True, world_size=64, engines=ENGINES[:3], rounds=max(3, options.rounds // 2))
    tables, failures, values = {}, [], {}
    for title, given in (("one rank", options), ("one of 64 ranks that move nothing", fake)):
        planted("no update")
        with ranks.one_rank(place.device) if not given.fake else ranks.fake_ranks(given.world_size):
            measured = step_time.measure(given, place.device)
        gc.collect()
        if place.on_cuda:
            torch.cuda.empty_cache()  # release the memory of these engines before the next ones
        rows = rows_of(measured, given, place.device)
        tables[f"{given.described()}; {title}"] = rows
        values[title] = step_time.as_json(measured)
        failures += [f"{title}: {text}" for text in wrong(measured, given, place)]
    first = next(iter(tables.values()))
    summary = f"same losses; {OURS}: {first[0]['ms']} ms, {first[0]['tokens/s']} tokens/s"
    if place.on_cuda:
        summary += f", MFU {first[0].get('MFU', 'unknown')}, {first[0][f'/ {THEIRS}']} of {THEIRS}"
    return Result.of(
        failures,
        summary,
        not_measured="" if place.on_cuda else "MFU, and how step times compare (no CUDA)",
        tables=tables,
        values=values,
    )


def rows_of(measured: dict[str, Any], options: Options, device: torch.device) -> list[dict[str, Any]]:
    """Return a row per engine: time, tokens/s and MFU of the median step, and ratios round by round."""
    samples = {name: [sample.seconds for sample in mine] for name, mine in measured["samples"].items()}
    rows = []
    for name, seconds in samples.items():
        reached = mfu(options, median(seconds), device)
        rows.append(
            {
                "engine": name,
                "ms": f"{median(seconds) * 1e3:.1f}",
                "tokens/s": f"{tokens_per_step(options) / median(seconds):,.0f}",
                **({} if reached is None else {"MFU": f"{reached:.1%}"}),
                **{
                    f"/ {base}": f"{ratios(seconds, samples[base]).middle:.3f}"
                    for base in ENGINES[1:]
                    if base in samples
                },
                "last loss": f"{measured['losses'][name]:.4f}",
            }
        )
    return rows + [{"engine": name, "ms": reason} for name, reason in measured["reasons"].items()]


def wrong(measured: dict[str, Any], options: Options, place: Place) -> list[str]:
    """Return the failures: a loss that is not finite or too different, or a step that takes too long."""
    failures = []
    losses = measured["losses"]
    if not options.fake:  # losses of fake ranks mean nothing
        ours, theirs = losses[OURS], losses[THEIRS]
        if not (math.isfinite(ours) and abs(ours - theirs) <= SAME_LOSS * abs(theirs)):
            failures.append(f"the last loss of {OURS} is {ours:.4f}, of {THEIRS} {theirs:.4f}")
    if place.on_cuda and not place.small:
        failures += too_slow({name: [sample.seconds for sample in mine] for name, mine in measured["samples"].items()})
    return failures


def too_slow(seconds: dict[str, list[float]]) -> list[str]:
    """Return a failure if zeroamp's steps take clearly longer than `MOST` allows."""
    spread = ratios(seconds[OURS], seconds[THEIRS])
    if spread.lower <= MOST:
        return []
    return [f"a step of {OURS} takes {spread.middle:.3f} of one of {THEIRS}, more than {MOST}"]
