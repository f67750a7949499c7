"""Starts the ranks of a job as forks of this process, injects faults, and waits for their end, with a bound.

A fork takes milliseconds, a new interpreter with torch seconds. This process must not run ops of torch: their threads
would be missing in a fork.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.job import Job, Log, run_rank
from benchmarks.faults.moments import Board, Moments, Strike

GRACE_S = 60.0
"""Seconds after the timeout of its collectives that a rank may take to end, on a busy machine."""
_CONNECTING = ("start: ", "load: begins")
"""Moments after which ranks connect a process group: that of training, and that of saving and loading."""
_TIMEOUTS_TO_CONNECT = 1 + 5
"""gloo waits one timeout for the address of a peer, and five for the connection to it (`Pair::waitUntilConnected`). If
a rank dies in between, the others wait for all of them."""

_TERMINATED = "terminate called without an active exception\n"


class ForkedRank(BaseException):
    """Raised in a fork to leave the campaign's code: the rank runs at the top level, and ends like any program."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self.run = run


@contextmanager
def at_end(clean_up: Callable[[], Any]) -> Iterator[None]:
    """Call `clean_up` at the end, also after an error, but in this process only and not in its forks."""
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            clean_up()


@dataclass(kw_only=True)
class Ending:
    """How one rank of a start ended."""

    status: int
    """The exit status, or minus the signal."""
    at_s: float
    """Time of its end, on the monotonic clock."""
    was_hanging: bool
    """Whether it had to be killed after the bound."""
    where: str
    """What it was doing last, see `Moments`."""
    log: list[dict[str, Any]]
    output: str

    @property
    def error(self) -> str | None:
        """The text of the error that the rank raised; None if it raised none."""
        return next((entry["text"] for entry in self.log if entry["event"] == "error"), None)

    @property
    def was_aborted_after_error(self) -> bool:
        """Whether the rank raised and reported its error, and was then aborted while the interpreter shut down.

        A thread of ProcessGroupGloo may release its last reference to a tensor then, and wait for the GIL. CPython
        before 3.14 ends such threads by unwinding, to which C++ reacts with `terminate` (its backtrace shows runLoop,
        decref_pyobject, pthread_exit). It can happen in any program that raises before it destroys its process groups.
        """
        return self.status == -signal.SIGABRT and self.error is not None and self.output.endswith(_TERMINATED)

    @property
    def is_finished(self) -> bool:
        """Whether the rank trained to the end."""
        return self.of("finished") is not None

    def of(self, event: str) -> dict[str, Any] | None:
        """Return the last entry of a kind."""
        return next((entry for entry in reversed(self.log) if entry["event"] == event), None)


@dataclass(kw_only=True)
class Start:
    """One running start of a job, with all its ranks."""

    job: Job
    pids: list[int]
    board: Board
    paths: list[Path]
    begun_s: float
    struck: set[int] = field(default_factory=set)
    """Ranks that a fault was injected into: they need not end by themselves."""
    endings: dict[int, Ending] = field(default_factory=dict)

    def kill(self, rank: int) -> None:
        """Kill -9 a rank, if it is still running."""
        if rank not in self.endings:
            self.struck.add(rank)
            self.board.note_strike()
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait_for_step(self, step: int) -> None:
        """Wait until a rank has finished a step, or ended."""
        while not self.endings and not any(f'"step": {step},' in path.read_text() for path in self._logs()):
            self.wait(time.monotonic() + 0.01)

    def _logs(self) -> list[Path]:
        return [path for path in self.paths if path.exists()]

    def wait(self, until_s: float | None = None) -> list[Ending]:
        """Wait until all ranks have ended, or until a time. Ranks that run longer than the job's bound are killed.

        The bound begins when the first rank ends, since the others wait for it in vain from then on.
        """
        total_s = 60 + self.job.timeout_s
        while len(self.endings) < len(self.pids):
            first = min((ending.at_s for ending in self.endings.values()), default=self.begun_s + total_s)
            is_connecting = any(self.board.read(rank).startswith(_CONNECTING) for rank in self._running())
            bound = first + self.job.timeout_s * (_TIMEOUTS_TO_CONNECT if is_connecting else 1) + GRACE_S
            limit = bound if until_s is None else min(bound, until_s)
            self._collect(limit - time.monotonic())
            running = [self.pids[rank] for rank in self._running()]
            is_over = bool(self.endings) and all(map(_is_stopped, running))  # stopped ranks never end by themselves
            if is_over or time.monotonic() >= bound:
                self._kill_running()
            elif time.monotonic() >= limit:
                break
        return [self.endings[rank] for rank in sorted(self.endings)]

    def _collect(self, timeout_s: float) -> None:
        descriptors = {os.pidfd_open(pid): r for r, pid in enumerate(self.pids) if r not in self.endings}
        ready, _, _ = select.select(list(descriptors), [], [], max(0.0, timeout_s))
        now = time.monotonic()
        for descriptor, rank in descriptors.items():
            os.close(descriptor)
            if descriptor in ready:
                self._reap(rank, now, was_hanging=False)

    def _running(self) -> set[int]:
        return set(range(len(self.pids))) - set(self.endings)

    def _kill_running(self) -> None:
        for rank in self._running():
            os.kill(self.pids[rank], signal.SIGKILL)
            self._reap(rank, time.monotonic(), was_hanging=rank not in self.struck)

    def _reap(self, rank: int, now: float, *, was_hanging: bool) -> None:
        _, status = os.waitpid(self.pids[rank], 0)
        lines = self.paths[rank].read_text().splitlines()
        output = self.paths[rank].with_suffix(".out").read_text(errors="replace")
        self.endings[rank] = Ending(
            status=os.waitstatus_to_exitcode(status),
            at_s=now,
            was_hanging=was_hanging,
            where=self.board.read(rank),
            log=[json.loads(line) for line in lines],
            output=output,
        )


def _is_stopped(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


@dataclass(kw_only=True)
class Place:
    """The folders of a job: one for its checkpoints, and one for the reports of its ranks."""

    folder: Path
    reports: Path
    num_starts: int = 0

    def start(
        self, job: Job, strike: Strike | None = None, *, before: Callable[[int], None] = lambda _: None,
        init_method: str | None = None,
    ) -> Start:  # fmt: skip
        """Fork the ranks of one start. `before` is called in each with its rank, before anything else."""
        self.num_starts += 1
        name = f"start{self.num_starts}"
        init_method = init_method or f"file://{self.reports / name}.store"
        board = Board(job.num_ranks)
        paths = [self.reports / f"{name}_rank{rank}.log" for rank in range(job.num_ranks)]
        pids = []
        begun_s = time.monotonic()
        for rank in range(job.num_ranks):
            board.write(rank, False, "start: forked")
            pid = os.fork()
            if pid == 0:
                ours = strike if strike is not None and strike.rank == rank else None
                moments = Moments(rank, board, ours)
                raise ForkedRank(lambda: _run(job, rank, init_method, self.folder, paths[rank], moments, before))  # noqa: B023
            pids.append(pid)
        struck = set() if strike is None else {strike.rank}
        return Start(job=job, pids=pids, board=board, paths=paths, begun_s=begun_s, struck=struck)


def _run(
    job: Job, rank: int, init_method: str, folder: Path, path: Path, moments: Moments, before: Callable[[int], None]
) -> None:
    output = os.open(path.with_suffix(".out"), os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before(rank)
    run_logged(job, rank, init_method, folder, path, moments)


def run_logged(job: Job, rank: int, init_method: str, folder: Path, path: Path, moments: Moments) -> None:
    """Run a rank that logs to `path`, and end the process with the exit status of its run."""
    log = Log(path)
    try:
        run_rank(job, rank, init_method, folder, log, moments)
    except BaseException as error:
        log.write(event="error", type=type(error).__name__, text=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        sys.exit(1)
    os._exit(0)  # shutting the interpreter down takes a second, and matters only after an error
