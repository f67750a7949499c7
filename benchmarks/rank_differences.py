"""Trains on ranks of which the last one differs, in every known way, and records how each rank ended.

    python -m benchmarks.rank_differences [--timeout-s 10] [--only NAME] --out FOLDER

FOLDER gets `rank-differences.json`, with every run, and `rank-differences.md`. Each run has processes of its own, which
are forked from a process that has imported torch. A difference must end with one error on all ranks that names it, or
with the backend's timeout and the name of the collective. Ranks that differ must not train to the end silently.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.differences.kinds import KINDS
from benchmarks.differences.training import Kind, train
from benchmarks.output import add_out, emit
from zeroamp import policies  # noqa: F401  # imported before the fork, like the next two
from zeroamp.training import step  # noqa: F401
from zeroamp.wrapping import wrap  # noqa: F401

NUM_RANKS = 2
LIMIT_S = 90.0
"""A rank that runs longer counts as hanging."""


@dataclass(kw_only=True)
class Ending:
    """How one rank ended."""

    error: str
    """The error's class; "" if the training ended; "SIGABRT" and the like; "hangs"."""
    text: str
    seconds: float
    """Time from the start of the training to the end of the rank."""


@dataclass(kw_only=True)
class Result:
    """One run of a kind of difference at a stage."""

    kind: str
    stage: int
    endings: list[Ending]
    outcome: str


def main() -> None:
    """Run all kinds. The exit status is 1 if a difference was silent, hung, or ended in another way than expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--timeout-s", type=float, default=10.0, help="timeout of every collective")
    add_out(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = KINDS if arguments.only is None else {arguments.only: KINDS[arguments.only]}
    results = []
    for name, kind in kinds.items():
        for stage in kind.stages:
            endings = run(kind, stage, arguments.timeout_s)
            results.append(Result(kind=name, stage=stage, endings=endings, outcome=outcome(kind, endings)))
            told = " | ".join(f"{ending.error} {ending.seconds:.1f} s {ending.text[:400]}" for ending in endings)
            print(f"{name}, stage {stage}: {results[-1].outcome}: {told}", flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        record = json.dumps([asdict(result) for result in results], indent=1)
        (arguments.out / "rank-differences.json").write_text(record)
    emit("rank_differences", _tables(results), arguments.out)
    sys.exit(any(result.outcome in ("silent", "hangs", "other") for result in results))


def run(kind: Kind, stage: int, timeout_s: float) -> list[Ending]:
    """Train on all ranks, each in a process of its own, and return how they ended."""
    context = multiprocessing.get_context("fork")
    processes, ours = [], []
    begun_s = time.monotonic()
    with tempfile.NamedTemporaryFile() as file:
        for rank in range(NUM_RANKS):
            receive, send = context.Pipe(duplex=False)
            arguments = (rank, kind, stage, timeout_s, file.name, send)
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            send.close()
            ours.append(receive)
        return [_ending(process, connection, begun_s) for process, connection in zip(processes, ours, strict=True)]


def _ending(process: Any, connection: Connection, begun_s: float) -> Ending:
    process.join(max(LIMIT_S - (time.monotonic() - begun_s), 0.1))
    seconds = time.monotonic() - begun_s
    if process.is_alive():
        process.kill()
        process.join()
        return Ending(error="hangs", text="", seconds=seconds)
    try:
        error, text, seconds = connection.recv()
    except EOFError:
        error, text = signal.Signals(-process.exitcode).name, "the process was ended by a signal"
    return Ending(error=error, text=text, seconds=seconds)


def _rank(rank: int, kind: Kind, stage: int, timeout_s: float, file: str, connection: Connection) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the backend's threads write to it too, when ranks end
    os.dup2(sys.stderr.fileno(), 2)
    begun_s = time.monotonic()
    store = dist.FileStore(file, NUM_RANKS)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=timeout_s))
    error, text = "", ""
    try:
        text = f"{train(kind, stage)} optimizer steps"
    except BaseException as raised:
        error, text = type(raised).__name__, str(raised)
    connection.send((error, text, time.monotonic() - begun_s))
    connection.close()
    os._exit(0)  # closes nothing in order, like a process that raised


def outcome(kind: Kind, endings: list[Ending]) -> str:
    """Return how a run ended, in a few words."""
    errors = {ending.error for ending in endings}
    if "hangs" in errors:
        return "hangs"
    if errors == {""}:
        return "harmless" if kind.error is None else "silent"
    if kind.error != "PeerError" and errors == {kind.error}:
        texts = {ending.text for ending in endings}
        return "named on all ranks" if len(texts) == 1 and kind.names in texts.pop() else "other"
    if any(error.startswith("SIG") for error in errors):
        return "aborted by the backend"
    if kind.error == "PeerError" and "PeerError" in errors and "RuntimeError" not in errors:
        return "timeout or lost rank, named"
    return "other"


def _tables(results: list[Result]) -> list[str]:
    counts: dict[str, int] = {}
    for result in results:
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
    summary = ["| ended | runs |", "|---|---|", *(f"| {name} | {count} |" for name, count in counts.items())]
    rows = ["| kind | stage | ended | rank 0 | rank 1 | longest, s |", "|---|---|---|---|---|---|"]
    for result in results:
        cells = [_cell(ending) for ending in result.endings]
        longest = max(ending.seconds for ending in result.endings)
        rows.append(f"| {result.kind} | {result.stage} | {result.outcome} | {' | '.join(cells)} | {longest:.1f} |")
    return [f"{len({result.kind for result in results})} kinds, {len(results)} runs.", *map("\n".join, (summary, rows))]


def _cell(ending: Ending) -> str:
    text = " ".join(ending.text.split()).replace("|", "/")
    return f"{ending.error}: {text[:300]}" if ending.error else text


if __name__ == "__main__":
    main()
