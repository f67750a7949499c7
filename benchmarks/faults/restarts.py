"""Runs that torchrun restarts: a rank is struck in one or two starts, and the last start must train to the end.

Run as a program, this file is one rank under torchrun.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.faults.attempt import Attempt, Runs
from benchmarks.faults.job import Job
from benchmarks.faults.moments import Board, Moments, Strike
from benchmarks.faults.processes import Ending, run_logged

_BOUND_S = 240.0
"""Seconds for all starts together. Each imports torch, on a busy machine."""


def restarted(runs: Runs) -> Attempt:
    """Strike a rank with SIGKILL or SIGTERM under `torchrun --max-restarts`: torchrun must restart all ranks."""
    job = runs.job(num_ranks=runs.random.choice((1, 2, 2)), save_every=1)
    attempt = runs.attempt("restarted by torchrun", job)
    strikes = [
        runs.strike(job, signal=runs.random.choice((signal.SIGKILL, signal.SIGTERM)))
        for _ in range(runs.random.choice((1, 1, 2)))
    ]
    status, output = _torchrun(attempt, strikes)
    attempt.lost(status != 0, f"torchrun ended with {status}: {output[-1500:]}")
    for start in range(len(strikes) + 1):
        newest = max(attempt.saved.values(), default=0)
        endings = [_ending(attempt, start, rank) for rank in range(job.num_ranks)]
        for rank, ending in enumerate(endings):
            attempt.check_log(rank, ending, newest)
        attempt.tell(endings)
        if all(ending.is_finished for ending in endings):
            break
        attempt.moments.append(_board(attempt, start).read(strikes[start].rank) if start < len(strikes) else "none")
    attempt.lost(not all(ending.is_finished for ending in endings), "the last start does not reach the end")
    attempt.finish()
    return attempt


def _torchrun(attempt: Attempt, strikes: list[Strike]) -> tuple[int, str]:
    reports = attempt.place.reports
    spec = {
        "job": asdict(attempt.job),
        "strikes": [asdict(strike) for strike in strikes],
        "folder": str(attempt.place.folder),
        "reports": str(reports),
    }
    (reports / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", str(attempt.job.num_ranks), "--max-restarts", str(len(strikes))]
    command += ["-m", "benchmarks.faults.restarts", str(reports / "spec.json")]
    # With torchrun's shared store, ranks of a restart may read the addresses of dead ranks.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (reports / "torchrun.out").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(_BOUND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    return status, (reports / "torchrun.out").read_text(errors="replace")


def _board(attempt: Attempt, start: int) -> Board:
    return Board(attempt.job.num_ranks, attempt.place.reports / f"restart{start}.board")


def _ending(attempt: Attempt, start: int, rank: int) -> Ending:
    """Return the ending of a rank of torchrun, from its log."""
    path = attempt.place.reports / f"restart{start}_rank{rank}.log"
    log = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    is_finished = any(entry["event"] == "finished" for entry in log)
    where = _board(attempt, start).read(rank)
    return Ending(
        status=0 if is_finished else 1, at_s=time.monotonic(), was_hanging=False, where=where, log=log, output=""
    )


def _main() -> None:
    """Run one rank under torchrun."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job, reports = Job(**spec["job"]), Path(spec["reports"])
    strikes = [Strike(**strike) for strike in spec["strikes"]]
    ours = strikes[start] if start < len(strikes) and strikes[start].rank == rank else None
    moments = Moments(rank, Board(job.num_ranks, reports / f"restart{start}.board"), ours)
    run_logged(job, rank, "env://", Path(spec["folder"]), reports / f"restart{start}_rank{rank}.log", moments)


if __name__ == "__main__":
    _main()
