"""Ranks that are killed or stopped."""

import functools
import signal
import time
from dataclasses import replace

from benchmarks.faults.attempt import Attempt, Runs
from benchmarks.faults.job import NUM_RANKS
from benchmarks.faults.moments import PASSAGES, Phase

_SAVING = 1.5
"""How much longer a run takes that saves, about."""


def at_moment(phase: Phase, runs: Runs) -> Attempt:
    """Kill -9 one rank at a random moment of a phase; in a third of the attempts, kill one in the next start, too."""
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
    """Kill -9 one rank, or sometimes all, from outside and at any time from their start on."""
    job = runs.job()
    attempt = runs.attempt("kill -9 at any time", job)
    start = attempt.start()
    start.wait(time.monotonic() + runs.random.uniform(0, attempt.oracle.seconds * _SAVING))
    ranks = list(range(NUM_RANKS)) if runs.random.random() < 0.2 else [runs.random.randrange(NUM_RANKS)]
    for rank in ranks:
        start.kill(rank)
    attempt.end(start)
    attempt.finish()
    return attempt


def stopped(runs: Runs) -> Attempt:
    """Stop one rank: it keeps its connections and locks, but does nothing. Kill it when the others have ended."""
    job = runs.job()
    attempt = runs.attempt("a rank that hangs (SIGSTOP)", job)
    attempt.run(replace(runs.strike(job), signal=signal.SIGSTOP))
    attempt.finish()
    return attempt


def two_writers(runs: Runs) -> Attempt:
    """Let two jobs save into one folder, and kill a rank of one of them."""
    job = runs.job()
    place = runs.place()
    doomed = runs.attempt("two writers, one killed", job, place)
    alike = runs.job(stage=job.stage, accumulation=job.accumulation)  # whose checkpoints lead to the same bits
    other = runs.attempt("", alike, replace(runs.place(), folder=place.folder))
    doomed.shares_folder = other.shares_folder = True
    starts = [doomed.start(), other.start()]
    starts[0].wait(time.monotonic() + runs.random.uniform(0, doomed.oracle.seconds * 2 * _SAVING))
    starts[0].kill(runs.random.randrange(NUM_RANKS))
    doomed.end(starts[0])
    endings = other.end(starts[1])
    other.lost(not all(ending.is_finished for ending in endings), "the other job does not finish")
    doomed.finish()
    doomed.losses += other.losses
    return doomed


KILLS = {f"kill {phase}": functools.partial(at_moment, phase) for phase in PASSAGES} | {"kill any time": at_any_time}
"""Kinds of attempts in which a rank is killed -9."""
