"""Step time of zeroamp beside FSDP2, DDP and DeepSpeed: paired steps, in the same processes.

    torchrun --nproc-per-node 2 -m benchmarks.step_time [--model 3.7m] [--rounds 50] [--out FOLDER]

Each engine has a model of its own, with equal weights, and takes the same steps. A round takes one step of each, in an
order that rotates, after a barrier. The tables have the medians over the rounds, without the first ones, and the ratios
to the base engines' steps of the same round, with quartiles. The row "again" repeats an engine, and shows the noise of
the method. The CPU time is that of the first rank's process, which other work on the machine disturbs less. Before the
rounds, the collectives of one step of each engine are counted.

Without torchrun one rank runs alone. With --fake it is one of --world-size fake ranks, whose collectives move nothing,
and the time is that of everything except communication. zeroamp and DeepSpeed compute the norm of the gradients in
every step, the others only with --clip.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import record
from benchmarks.peers.counting import Collectives
from benchmarks.peers.engine import Engine, Setup, UnavailableError, setup
from benchmarks.peers.engines import DEFAULT_BASES, DEFAULT_ENGINES, builder
from benchmarks.peers.options import Options
from benchmarks.peers.processes import start
from benchmarks.peers.timing import ratios, rounds
from benchmarks.throughput import mfu, tokens_per_step

STEPS_BEFORE_COUNTING = 2  # in the first ones engines learn an order or make the optimizer's state

Counted = dict[tuple[str, torch.dtype], tuple[int, int]]


def build_all(ready: Setup, names: tuple[str, ...]) -> tuple[dict[str, Engine], dict[str, str]]:
    """Return name -> engine, and name -> why an engine is not available."""
    engines, reasons = {}, {}
    for name in names:
        try:
            engines[name] = builder(name)(ready)
        except UnavailableError as error:
            reasons[name] = str(error)
    return engines, reasons


def counted(engine: Engine) -> Counted:
    """Return the collectives of one step, counted at the process group. Compiled code runs uncompiled here.

    Raises:
        AssertionError: the engine's own count differs.
    """
    with torch.compiler.set_stance("force_eager"):
        for _ in range(STEPS_BEFORE_COUNTING):
            engine.step()
        before = engine.own_count() if engine.own_count else {}
        with Collectives() as collectives:
            engine.step()
        after = engine.own_count() if engine.own_count else {}
    found = collectives.totals()
    own = {key: (after[key][0] - before[key][0], after[key][1] - before[key][1]) for key in after}
    if engine.own_count and own != found:
        raise AssertionError(f"the process group got {found}, but the engine counted {own}")
    return found


def measure(options: Options, device: torch.device) -> dict[str, Any]:
    """Return everything that was measured, on this rank."""
    ready = setup(options, device, dist.get_rank())
    engines, reasons = build_all(ready, options.engines or DEFAULT_ENGINES)
    traffic = {name: counted(engine) for name, engine in engines.items()}
    steps = {name: engine.step for name, engine in engines.items()}
    samples = rounds(steps, device, num_rounds=options.rounds, warm_up=options.warm_up)
    losses = {name: float(engine.step()) for name, engine in engines.items()}
    return {"samples": samples, "traffic": traffic, "losses": losses, "reasons": reasons}


def time_rows(
    measured: dict[str, Any], of: str, bases: Sequence[str], options: Options, device: torch.device
) -> list[dict[str, str]]:
    """Return a row per engine: the median of a field of its samples, and its ratios to each base.

    For the field "seconds" also tokens/s of one rank and, if the device's data sheet is known, MFU (`throughput.py`).
    """
    values = {name: [getattr(sample, of) for sample in mine] for name, mine in measured["samples"].items()}
    rows = []
    for name, mine in values.items():
        row = {"engine": name, "ms": f"{median(mine) * 1e3:.2f}"}
        if of == "seconds":
            row["tokens/s"] = f"{tokens_per_step(options) / median(mine):,.0f}"
            reached = mfu(options, median(mine), device)
            row |= {} if reached is None else {"MFU": f"{reached:.1%}"}
        for base in bases:
            spread = ratios(mine, values[base])
            row[f"/ {base}"] = f"{spread.middle:.3f} ({spread.lower:.3f} to {spread.upper:.3f})"
        rows.append({**row, "last loss": f"{measured['losses'][name]:.4f}"})
    return rows + [{"engine": name, "ms": reason} for name, reason in measured["reasons"].items()]


def traffic_rows(measured: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row per engine: MB (1e6 bytes) of the unsharded tensors and, in parentheses, calls."""
    kinds = sorted({kind for found in measured["traffic"].values() for kind in found}, key=str)
    rows = []
    for name, found in measured["traffic"].items():
        row = {"engine": name}
        for kind in kinds:
            calls, num_bytes = found.get(kind, (0, 0))
            row[_kind(kind)] = f"{num_bytes / 1e6:.2f} ({calls})" if calls else ""
        rows.append(row)
    return rows


def _kind(kind: tuple[str, torch.dtype]) -> str:
    return f"{kind[0]} {str(kind[1]).removeprefix('torch.')}"


def as_json(measured: dict[str, Any]) -> dict[str, Any]:
    """Return every value."""
    return {
        "rounds": {name: [sample.as_json() for sample in mine] for name, mine in measured["samples"].items()},
        "traffic": {
            name: {_kind(kind): {"calls": calls, "bytes": size} for kind, (calls, size) in found.items()}
            for name, found in measured["traffic"].items()
        },
        "losses": measured["losses"],
        "not run": measured["reasons"],
    }


def report(measured: dict[str, Any], options: Options, device: torch.device) -> str:
    """Return the Markdown of a measurement, below its title."""
    bases = [base for base in options.bases or DEFAULT_BASES if base in measured["samples"]]
    parts = [
        *record.head("benchmarks.step_time", options, device),
        "Time of a step: median over the rounds; tokens/s are those of one rank. Ratios are taken round by round: "
        "their median and quartiles.",
        record.markdown(time_rows(measured, "seconds", bases, options, device)),
        "CPU time of the first rank's process in a step, in the same way.",
        record.markdown(time_rows(measured, "cpu_seconds", bases, options, device)),
        "What one step moves: MB (1e6 bytes) of unsharded tensors, calls in parentheses, counted at the process group. "
        "An all-reduce moves twice what a reduce-scatter of its size does.",
        record.markdown(traffic_rows(measured)),
    ]
    return "\n\n".join(parts)


def main() -> None:
    options = Options.from_command_line(__doc__)
    device = start(options)
    measured = measure(options, device)
    if dist.get_rank() == 0:
        body = report(measured, options, device)
        print(body)
        if options.out is not None:
            values = {"versions": record.versions(), **as_json(measured)}
            record.write(options.out, title=f"Step time, {options.model}", body=body, name="rounds", values=values)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
