"""Thousands of ranks from one process: the advice of `zeroamp plan`, and the time of wrapping and initialising.

    OMP_NUM_THREADS=1 python -m benchmarks.scale [--gpu h100] [--rounds 7] [--out FOLDER]

Plans: LLaMA-3 8B, 70B and 405B with activation checkpointing, one sample per micro-batch and rank, ZeRO-3, at 64, 1,024
and 16,384 ranks of nodes of eight. All times are models (`docs/plan.md`); none was measured on a GPU.

Wrapping: rank 0 of fake ranks, on the meta device without initialisation. Times are the processor's. torch's chunks and
zeroamp's (`chunks_on_demand`) are compared at 1,024 ranks only, since the time of torch's grows with the ranks.

Initialising: a LLaMA of 0.1e9 parameters, rank 0 of 8 fake ranks, on the CPU. Two ways to find what initialisers
overwrite are compared in turns, by processor time: recording it, and filling with NaN and searching for it.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median, quantiles
from unittest.mock import patch

import torch
from tabulate import tabulate

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from benchmarks.output import add_out, emit
from zeroamp.cli.model_source import load_model
from zeroamp.dry_run.meshes import MeshPlan
from zeroamp.dry_run.run_plan import RunPlan
from zeroamp.hooks.random_state import random_state
from zeroamp.wrapping import materialize

MODELS = {"llama3-8b": 8192, "llama3-70b": 8192, "llama3-405b": 4096}
"""Folder of `examples/models` -> tokens per sample. A micro-batch of 405B still fits on an H100."""
NUM_RANKS = (64, 1024, 16384)
CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}


def plans(gpu: str) -> Iterator[tuple[str, RunPlan]]:
    """Yield (model, plan) of each model and number of ranks."""
    policy = zeroamp.policy_from_config(CONFIG)
    for name, seq in MODELS.items():
        model = load_model(f"examples/models/{name}")
        for num_ranks in NUM_RANKS:
            options = {"world_size": num_ranks, "batch": 1, "seq": seq, "checkpointing": True, "gpu": gpu}
            yield name, zeroamp.plan_run(model, policy, stages=(3,), **options)


def mesh_row(run: RunPlan, mesh: MeshPlan) -> dict[str, str]:
    """Return the columns of one mesh."""
    time = mesh.time
    return {
        "mesh": str(mesh.shape),
        "peak GiB": f"{mesh.peak_bytes / 2**30:.1f}",
        "fits": "yes" if mesh.fits else "no",
        "step s": f"{time.total:.3f}",
        "network s": f"{time.communication:.3f}",
        "latency s": f"{time.latency:.3f}",
        "sums s": f"{time.sums:.3f}",
        "exposed s": f"{time.exposed:.3f}",
        "padding": f"{mesh.padding:.1%}",
        "tokens/s per GPU": f"{run.batch * run.seq / time.total:,.0f}",
    }


def tables_of_plans(gpu: str) -> list[str]:
    """Return the table of the advised meshes, and the table of all meshes that were compared."""
    advised, tried = [], []
    for name, run in plans(gpu):
        if run.meshes is None:
            raise AssertionError(f"expected meshes of {name} at {run.world_size} ranks, got none")
        row = {"model": name, "tokens": f"{run.seq}", "ranks": f"{run.world_size:,}"}
        advised.append({**row, **mesh_row(run, run.meshes.best), "reason": run.meshes.reason})
        tried += [{**row, **mesh_row(run, mesh)} for mesh in run.meshes.tried]
    return ["## The mesh that is advised", _table(advised), "## Every mesh", _table(tried)]


def wrapping(rows_of: tuple[int, ...] = NUM_RANKS) -> str:
    """Return the table of `wrap_model`'s seconds."""
    rows = []
    for name in MODELS:
        row = {"model": name}
        for num_ranks in rows_of:
            row[f"{num_ranks:,} ranks, s"] = f"{wrapped(name, num_ranks):.2f}"
        with patch("zeroamp.wrapping.shard.chunks_on_demand", nullcontext):
            row["1,024 ranks with torch's chunks, s"] = f"{wrapped(name, 1024):.2f}"
        rows.append(row)
    return _table(rows)


def wrapped(name: str, num_ranks: int) -> float:
    """Return the processor's seconds of `wrap_model` on the meta device."""
    model, policy = load_model(f"examples/models/{name}"), zeroamp.policy_from_config(CONFIG)
    with fake_ranks(num_ranks):
        begin = time.process_time()
        zeroamp.wrap_model(model, policy, materialize=False)
        return time.process_time() - begin


def initialised(num_rounds: int) -> str:
    """Return the ratio of the two ways to find what an initialiser does not set."""
    ways: dict[str, Callable[[], float]] = {"recorded": _seconds_to_initialise, "scanned": _scanned}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(num_rounds + 1):
        for name in sorted(ways, reverse=index % 2 == 1):
            found[name].append(ways[name]())
    lower, middle, upper = quantiles([a / b for a, b in zip(found["recorded"], found["scanned"], strict=True)][1:], n=4)
    seconds = {f"{name} s": f"{median(values[1:]):.2f}" for name, values in found.items()}
    return _table([{**seconds, "ratio": f"{middle:.2f} ({lower:.2f} to {upper:.2f})"}])


def _seconds_to_initialise() -> float:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **shape))
    with fake_ranks(8):
        begin = time.process_time()
        zeroamp.wrap_model(model, zeroamp.policy_from_config(CONFIG))
        return time.process_time() - begin


@contextmanager
def _scanning() -> Iterator[None]:
    def scanned(module: torch.nn.Module, initializer: Callable[[], object], device: torch.device) -> str | None:
        return materialize._first_left_of_a_fill(module, initializer, random_state(device), device)

    with patch.object(materialize, "_first_unset", scanned):
        yield


def _scanned() -> float:
    with _scanning():
        return _seconds_to_initialise()


def _table(rows: list[dict[str, str]]) -> str:
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100", help="one of zeroamp.GPUS")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of initialising, after a first one")
    add_out(parser)
    options = parser.parse_args()
    wrapped("llama3-8b", 2)  # warm up: the first model of a process takes longer
    parts = ["## Wrapping", wrapping(), "## Initialising", initialised(options.rounds), *tables_of_plans(options.gpu)]
    emit("scale", parts, options.out)


if __name__ == "__main__":
    main()
