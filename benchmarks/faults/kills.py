"""Ranks that are killed or stopped."""

import functools
import signal
import time
from dataclasses import replace

from benchmarks.faults.attempt import Attempt, Runs
from benchmarks.faults.job import EXPORT
from benchmarks.faults.moments import PASSAGES, Phase

_SAVING = 1.5
"""About how many times longer a run takes with saves."""


def at_moment(phase: Phase, runs: Runs) -> Attempt:
    """Kill -9 one rank at a random moment of a phase. In a third of the attempts, kill one in the next start too."""
    job = runs.job()
    attempt = runs.attempt(f"kill -9 in {phase}", job)
    if phase == "load":
        attempt.run(num_steps=runs.random.randint(1, job.num_steps - 1))
    attempt.run(runs.strike(job, phase))
    while attempt.moments and runs.random.random() < 1 / 3:
        attempt.run(runs.strike(job))
    attempt.finish()
    return attempt


def at_any_time(runs: Runs) -> Attempt:
    """Kill -9 one rank, or sometimes all, from outside at a random time after their start."""
    job = runs.job()
    attempt = runs.attempt("kill -9 at any time", job)
    start = attempt.start()
    start.wait(time.monotonic() + runs.random.uniform(0, attempt.oracle.seconds * _SAVING))
    ranks = list(range(job.num_ranks)) if runs.random.random() < 0.2 else [runs.random.randrange(job.num_ranks)]
    for rank in ranks:
        start.kill(rank)
    attempt.end(start)
    attempt.finish()
    return attempt


def stopped(runs: Runs) -> Attempt:
    """Stop one rank: it holds its connections and locks, but does nothing. Kill it when the others have ended."""
    job = runs.job(num_ranks=runs.several())
    attempt = runs.attempt("a rank that hangs (SIGSTOP)", job)
    attempt.run(replace(runs.strike(job), signal=signal.SIGSTOP))
    attempt.finish()
    return attempt


def two_writers(runs: Runs) -> Attempt:
    """Let two jobs save into one folder, and kill a rank of one of them."""
    job = runs.job()
    place = runs.place()
    doomed = runs.attempt("two writers, one killed", job, place)
    # with the same stage, ranks and accumulation, so that its checkpoints lead to the same bits
    alike = runs.job(num_ranks=job.num_ranks, stage=job.stage, accumulation=job.accumulation)
    other = runs.attempt("", alike, replace(runs.place(), folder=place.folder))
    doomed.shares_folder = other.shares_folder = True
    starts = [doomed.start(), other.start()]
    starts[0].wait(time.monotonic() + runs.random.uniform(0, doomed.oracle.seconds * 2 * _SAVING))
    starts[0].kill(runs.random.randrange(job.num_ranks))
    doomed.end(starts[0])
    endings = other.end(starts[1])
    other.lost(not all(ending.is_finished for ending in endings), "the other job does not finish")
    doomed.finish()
    doomed.losses += other.losses
    return doomed


def terminated(runs: Runs) -> Attempt:
    """Send SIGTERM to a rank that does not handle it."""
    job = runs.job()
    attempt = runs.attempt("SIGTERM, not handled", job)
    attempt.run(replace(runs.strike(job), signal=signal.SIGTERM))
    attempt.finish()
    return attempt


def preempted(runs: Runs) -> Attempt:
    """Send SIGTERM to a rank that handles it: all ranks must save after the step and exit, without a loss."""
    job = runs.job(handles_sigterm=True, save_every=runs.random.choice((0, 1, 2)))
    attempt = runs.attempt("SIGTERM, a last save", job)
    strike = runs.strike(job, runs.random.choice(("load", "forward", "backward", "step", "save")))
    endings = attempt.run(replace(strike, signal=signal.SIGTERM, torn=None))
    for rank, ending in enumerate(endings):
        is_whole = ending.status == 0 and (ending.is_finished or ending.of("preempted") is not None)
        attempt.lost(not is_whole, f"rank {rank} ended with {ending.status}: {ending.output[-500:]}")
    last = max((entry["step"] for ending in endings if (entry := ending.of("preempted"))), default=None)
    attempt.lost(last is not None and last not in attempt.saved.values(), f"step {last} is not saved")
    attempt.finish()
    return attempt


def exporting(runs: Runs) -> Attempt:
    """Kill a rank while it exports: the export must be the previous or the new one, and complete."""
    job = runs.job(exports=True, save_every=2)
    attempt = runs.attempt("kill -9 in export", job)
    if runs.random.random() < 0.5:
        attempt.run(num_steps=runs.random.randint(1, job.num_steps - 1))  # leaves an earlier export
    attempt.run(runs.strike(job, "export"))
    attempt.finish()
    last = attempt.exports[-1] if attempt.exports else None
    attempt.lost(attempt.exported() != last, "the export does not hold the trained weights")
    root = attempt.place.folder.parent
    left = [path.name for path in (*root.glob(".*"), *(root / EXPORT).glob(".*"))]
    attempt.lost(bool(left), f"left beside the export: {left}")
    return attempt


KILLS = {f"kill {phase}": functools.partial(at_moment, phase) for phase in PASSAGES} | {"kill any time": at_any_time}
"""Kinds of attempts in which a rank is killed -9."""
