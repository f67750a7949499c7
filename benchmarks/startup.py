"""The time of starting: the import, and `wrap_model` on a 7B LLaMA shape and on deeper ones.

    OMP_NUM_THREADS=1 python -m benchmarks.startup [--rounds 10] [--blocks 10 32 100 1000] [--out FOLDER]

Imports: each round starts one process per statement, in an order that rotates. The table has the processor's time (user
and system, median), its ratio to that of `import torch` in the same round (median and quartiles), and the same for wall
time.

The import's own time: `python -X importtime`, the modules' own times summed by package, for what the quick start
imports in addition to `torch.distributed.fsdp`. It is one process: read the numbers as shares.

Wrapping: rank 0 of 8, ZeRO-3. The model is on the meta device and stays there, so that its initialisation, which mostly
draws random numbers, is not measured. Times are the processor's. "calls" are calls of Python functions, counted in a
second run, which do not depend on the machine. "fully_shard" is FSDP2's part of the time.
"""

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import fully_shard

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from benchmarks.output import add_out, emit

FSDP2 = "import torch, torch.distributed.fsdp"
QUICK_START = "from zeroamp import wrap_model, policy_from_config, TrainStep, explain"
STATEMENTS = ("import torch", "import zeroamp", "import torch, zeroamp", FSDP2, QUICK_START, "from zeroamp import *")
NUM_RANKS = 8
CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}


def started(statement: str, *options: str) -> tuple[float, float, str]:
    """Run `statement` in a new process. Return its wall time and processor time in seconds, and its stderr."""
    begin, before = time.perf_counter(), os.times()
    result = subprocess.run(
        [sys.executable, *options, "-c", statement], check=True, capture_output=True, text=True, timeout=300
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, used, result.stderr


def imports(num_rounds: int) -> str:
    """Return the table of the statements."""
    found: dict[str, list[tuple[float, float]]] = {statement: [] for statement in STATEMENTS}
    for index in range(num_rounds + 1):
        turn = index % len(STATEMENTS)
        for statement in STATEMENTS[turn:] + STATEMENTS[:turn]:
            found[statement].append(started(statement)[:2])
    rows = []
    for statement, times in found.items():
        row: dict[str, object] = {"statement": f"`{statement}`"}
        for index, name in ((1, "processor"), (0, "clock")):
            values, bases = ([pair[index] for pair in of[1:]] for of in (times, found["import torch"]))
            lower, middle, upper = quantiles([a / b for a, b in zip(values, bases, strict=True)], n=4)
            row |= {f"{name} s": f"{median(values):.2f}", f"{name} ratio": f"{middle:.2f} ({lower:.2f} to {upper:.2f})"}
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def shares() -> str:
    """Return the table of what the quick start imports in addition to FSDP2, by package."""
    mark = "print('MARK', file=sys.stderr)"
    statement = f"import sys; {FSDP2}; {mark}; {QUICK_START}"
    lines = started(statement, "-X", "importtime")[2].partition("MARK\n")[2].splitlines()
    packages: Counter[str] = Counter()
    for own, _, name in (line.removeprefix("import time:").split("|") for line in lines if "|" in line):
        parts = name.strip().split(".")
        packages[".".join(parts[: 3 if parts[0] == "torch" else 2 if parts[0] == "zeroamp" else 1])] += int(own)
    groups = Counter[str]()
    for package, microseconds in packages.items():
        groups[package if microseconds > 0.02 * packages.total() else "all others"] += microseconds
    rows = [{"package": name, "ms": f"{microseconds / 1e3:.0f}"} for name, microseconds in groups.most_common()]
    return tabulate(
        [*rows, {"package": "sum", "ms": f"{packages.total() / 1e3:.0f}"}], headers="keys", tablefmt="github"
    )


def llama(num_blocks: int) -> nn.Module:
    """Return a model of LLaMA-7B's layers, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_blocks))


@contextmanager
def timed_fully_shard() -> Iterator[list[float]]:
    """Yield a list that fills with the processor seconds of each call of `fully_shard` by zeroamp."""
    seconds: list[float] = []

    @wraps(fully_shard)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return fully_shard(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - begin)

    with ExitStack() as stack:
        for module in ("zeroamp.wrapping.shard", "zeroamp.hooks.typed_groups"):
            stack.enter_context(patch(f"{module}.fully_shard", timed))
        yield seconds


def num_calls(action: Callable[[], object]) -> int:
    """Return the Python functions that `action` calls."""
    with cProfile.Profile(builtins=False) as profile:
        action()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def wrapped(num_blocks: int) -> dict[str, object]:
    """Return the row of one depth."""
    policy = zeroamp.policy_from_config(CONFIG)
    model = llama(num_blocks)
    numel = sum(parameter.numel() for parameter in model.parameters())
    with timed_fully_shard() as of_fsdp2:
        begin = time.process_time()
        zeroamp.wrap_model(model, policy, materialize=False)
        seconds = time.process_time() - begin
    optimizer = torch.optim.AdamW(model.parameters())
    begin = time.process_time()
    zeroamp.TrainStep(model, optimizer)
    of_train_step = time.process_time() - begin
    again = llama(num_blocks)
    calls = num_calls(lambda: zeroamp.wrap_model(again, policy, materialize=False))
    return {
        "blocks": num_blocks,
        "parameters": f"{numel / 1e9:.1f}e9",
        "wrap_model s": f"{seconds:.2f}",
        "ms per block": f"{seconds / num_blocks * 1e3:.1f}",
        "fully_shard s": f"{sum(of_fsdp2):.2f}",
        "calls per block": f"{calls / num_blocks:,.0f}",
        "TrainStep s": f"{of_train_step:.3f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of process starts, after a first one")
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 32, 100, 1000])
    add_out(parser)
    options = parser.parse_args()
    parts = ["## Import", imports(options.rounds), "## What the quick start imports beside FSDP2", shares()]
    with fake_ranks(NUM_RANKS):
        wrapped(2)  # warm up: the first model of a process takes longer
        rows = [wrapped(num_blocks) for num_blocks in options.blocks]
    parts += ["## Wrapping", tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)]
    emit("startup", parts, options.out)


if __name__ == "__main__":
    main()
