"""One attempt: a run that faults interrupt. It is restarted until it ends, and checked at every start."""

import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.faults.job import EXPORT, Job, tensors_digest
from benchmarks.faults.moments import NUM_EXPORT_PASSAGES, PASSAGES, Phase, Strike
from benchmarks.faults.processes import Ending, Place, Start
from zeroamp.checkpoint.manifest import check_file, read_manifest
from zeroamp.policies.errors import CheckpointError

_REFUSALS = {"CheckpointError", "DamagedCheckpointError"}


@dataclass(kw_only=True)
class Oracle:
    """Results of a run without faults. Every run with faults must have the same bits."""

    steps: list[dict[int, dict[str, Any]]]
    """Per rank: step -> losses and norm, as hexadecimal floats."""
    digests: list[str]
    seconds: float
    """Duration of the run, with its start."""


@dataclass(kw_only=True)
class Attempt:
    """The faults that were injected into one run, and its losses."""

    kind: str
    job: Job
    place: Place
    oracle: Oracle
    story: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    """Must stay empty."""
    moments: list[str] = field(default_factory=list)
    """What each struck rank was doing."""
    errors: list[str] = field(default_factory=list)
    """Errors of the survivors."""
    survivors_s: list[float] = field(default_factory=list)
    """Seconds from the strike to the end of each survivor."""
    saved: dict[str, int] = field(default_factory=dict)
    """Checkpoint that a rank reported as saved -> its step."""
    damaged: set[str] = field(default_factory=set)
    """Checkpoints that the campaign has damaged."""
    foreign: set[str] = field(default_factory=set)
    """Names of foreign files and folders in the folder."""
    states: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Step -> digests of the states to save, for jobs that log them."""
    exports: list[str] = field(default_factory=list)
    """Digests of the weights to export."""
    shares_folder: bool = False
    """Whether another job saves to the same folder."""

    def start(self, strike: Strike | None = None, *, num_steps: int | None = None, **more: Any) -> Start:
        """Start the job's ranks, up to a number of steps or the end."""
        job = self.job if num_steps is None else replace(self.job, num_steps=num_steps)
        return self.place.start(job, strike, **more)

    def end(self, start: Start) -> list[Ending]:
        """Wait for the ranks, and check everything they did."""
        endings = start.wait()
        newest = max((step for name, step in self.saved.items() if name not in self.damaged), default=0)
        for rank, ending in enumerate(endings):
            self._check_rank(rank, ending, newest, is_struck=rank in start.struck)
        self._check_published()
        if self.job.exports:
            self._check_exported()
        survivors = [ending for rank, ending in enumerate(endings) if rank not in start.struck]
        if start.board.struck_s:
            self.moments += [ending.where for rank, ending in enumerate(endings) if rank in start.struck]
            self.survivors_s += [ending.at_s - start.board.struck_s for ending in survivors]
        self.tell(endings)
        return endings

    def tell(self, endings: list[Ending]) -> None:
        """Add one start to the story."""
        how = ", ".join(_how(ending) for ending in endings)
        self.story.append(f"from step {_loaded(endings)} to {_last_step(endings)} ({how})")

    def run(self, strike: Strike | None = None, **more: Any) -> list[Ending]:
        """Start the ranks, wait for them, and check what they did."""
        return self.end(self.start(strike, **more))

    def finish(self) -> None:
        """Start again without a fault: the run must reach its end, and leave the folder clean."""
        endings = self.run()
        if not all(ending.is_finished for ending in endings):
            self.losses.append(f"does not run to the end: {[ending.error for ending in endings]}")
            return
        has_saved = any(ending.of("saved") for ending in endings)
        left = {path.name for path in self.place.folder.glob(".*")} - {".lock"} - self.foreign
        if has_saved and left and not self.shares_folder:
            self.losses.append(f"left in the folder: {sorted(left)}")
        whole = self._published()
        # Only a save removes old checkpoints. Those that a killed save left stay until the next one.
        if has_saved and self.job.keep is not None and len(whole) > self.job.keep and not self.shares_folder:
            self.losses.append(f"{len(whole)} checkpoints are left")

    def lost(self, is_lost: bool, what: str) -> None:
        """Note a loss."""
        if is_lost:
            self.losses.append(what)

    def expect_refusal(self, endings: list[Ending], *words: str) -> None:
        """Check that all ranks raised a CheckpointError with certain words, and left no draft."""
        for rank, ending in enumerate(endings):
            error = ending.of("error")
            if error is None or error["type"] not in _REFUSALS or not all(word in error["text"] for word in words):
                self.losses.append(f"rank {rank} raised {ending.error}, not a CheckpointError with {words}")
        self.lost(bool(list(self.place.folder.glob(".draft-*"))), "a draft is left after an error of all ranks")

    def _check_rank(self, rank: int, ending: Ending, newest: int, *, is_struck: bool) -> None:
        self.lost(ending.was_hanging, f"rank {rank} hangs: {ending.where}")
        if not is_struck and ending.error is not None:
            self.errors.append(ending.error)
        has_ended = ending.was_hanging or ending.status in (0, 1) or ending.was_aborted_after_error
        if not is_struck and not has_ended:
            self.losses.append(f"rank {rank} ended with {ending.status}: {ending.output[-500:]}")
        self.check_log(rank, ending, newest)

    def check_log(self, rank: int, ending: Ending, newest: int) -> None:
        """Compare a rank's report with the oracle and the saved checkpoints. `newest`: step of the last of these."""
        loaded = ending.of("loaded")
        if loaded is not None and not self.shares_folder:
            step = loaded["step"]
            self.lost(step < newest, f"rank {rank} resumed at step {step}, though {newest} was saved")
            differs = step > 0 and self.job.logs_state and loaded["state"] not in self.states[step]
            self.lost(differs, f"rank {rank} loaded another state of step {step} than was saved")
        for entry in ending.log:
            if entry["event"] == "step":
                expected = self.oracle.steps[rank].get(entry["step"])
                self.lost(entry != expected, f"rank {rank}: {entry} instead of {expected}")
            elif entry["event"] == "state":
                self.states[entry["step"]].add(entry["state"])
            elif entry["event"] == "exporting" and rank == 0:  # the first rank's buffers are written
                self.exports.append(entry["digest"])
            elif entry["event"] == "saved":
                self.saved[entry["name"]] = entry["step"]
        finished = ending.of("finished")
        if finished is not None and finished["num_steps"] == self.job.num_steps:
            differs = finished["digest"] != self.oracle.digests[rank]
            self.lost(differs, f"rank {rank}: other parameters at the end")

    def exported(self) -> str | None:
        """Return a digest of the tensors in the export, None if there is no export."""
        path = self.place.folder.with_name(EXPORT) / "model.safetensors"
        return tensors_digest(load_file(path)) if path.exists() else None

    def _check_exported(self) -> None:
        try:
            digest = self.exported()
        except Exception as error:
            self.losses.append(f"an export that cannot be read: {error}")
        else:
            self.lost(digest not in (None, *self.exports), "an export of other weights")

    def _check_published(self) -> None:
        for path in self._published():
            try:
                for name, record in read_manifest(path).files.items():
                    check_file(path / name, record)
            except CheckpointError as error:
                self.lost(path.exists(), f"a checkpoint that is not whole: {error}")
        if self.job.keep is None:
            gone = [name for name in self.saved if not (self.place.folder / name).is_dir()]
            self.lost(bool(gone), f"saved, but missing: {gone}")

    def _published(self) -> list[Path]:
        """Return the checkpoints in the folder that must be complete."""
        others = self.damaged | self.foreign
        return [path for path in self.place.folder.glob("step_*") if path.name not in others]


def _how(ending: Ending) -> str:
    return "finished" if ending.is_finished else f"{ending.status} at {ending.where}"


def _loaded(endings: list[Ending]) -> Any:
    return next((loaded["step"] for ending in endings if (loaded := ending.of("loaded"))), "none")


def _last_step(endings: list[Ending]) -> Any:
    return max((step["step"] for ending in endings if (step := ending.of("step"))), default=_loaded(endings))


class Runs:
    """Makes attempts, and the runs without faults that they are compared with, all in one folder."""

    def __init__(self, root: Path, seed: int, timeout_s: float) -> None:
        self.random = random.Random(seed)
        self._timeout_s = timeout_s
        self._root = root
        self._oracles: dict[tuple[int, ...], Oracle] = {}
        self._decks: dict[Phase, list[int]] = {}
        self._num_places = 0
        self._has_losses = False

    def place(self) -> Place:
        """Make empty folders for a run."""
        self._num_places += 1
        root = self._root / f"{self._num_places:04d}"
        (root / "reports").mkdir(parents=True)
        return Place(folder=root / "checkpoints", reports=root / "reports")

    def clear(self, attempt: Attempt) -> None:
        """Remove all files of attempts so far, unless one of them had a loss."""
        self._has_losses |= bool(attempt.losses)
        if not self._has_losses:
            for path in self._root.iterdir():
                shutil.rmtree(path)

    def several(self) -> int:
        """Draw a number of ranks, at least 2."""
        return self.random.choice((2, 2, 3, 4))

    def job(self, **fields: Any) -> Job:
        """Draw a random job, except for the given fields."""
        choice = self.random.choice
        drawn: dict[str, Any] = {
            "num_ranks": choice((1, 2, 2, 3, 4)),
            "stage": choice((0, 1, 2, 3)),
            "accumulation": choice((1, 2)),
            "async_": choice((False, True)),
            "keep": choice((None, 1, 2)),
            "save_every": choice((1, 1, 2)),
            "timeout_s": self._timeout_s,
        }
        return Job(**{**drawn, **fields})

    def attempt(self, kind: str, job: Job, place: Place | None = None) -> Attempt:
        """Begin an attempt in an empty place or a given one."""
        return Attempt(kind=kind, job=job, place=place or self.place(), oracle=self.oracle(job))

    def oracle(self, job: Job) -> Oracle:
        """Return the results of a run without faults and without checkpoints."""
        key = (job.num_ranks, job.stage, job.accumulation, job.num_steps)
        if key not in self._oracles:
            self._oracles[key] = self.faultless(replace(job, save_every=0, exports=False), self.place())
        return self._oracles[key]

    def faultless(self, job: Job, place: Place) -> Oracle:
        """Return the results of a job without faults, from the newest checkpoint of a place if it has one."""
        start = place.start(job)
        endings = start.wait()
        return Oracle(
            steps=[{e["step"]: e for e in ending.log if e["event"] == "step"} for ending in endings],
            digests=[_digest(ending) for ending in endings],
            seconds=max(ending.at_s for ending in endings) - start.begun_s,
        )

    def strike(self, job: Job, phase: Phase | None = None, **fields: Any) -> Strike:
        """Draw a moment of a phase, or of any phase, on a rank that has such moments."""
        phase = phase or self.random.choice(list(PASSAGES))
        return Strike(
            rank=0 if phase == "publish" else self.random.randrange(job.num_ranks),
            phase=phase,
            step=0 if phase == "load" else self.random.randint(1, job.num_steps),
            passage=self._passage(phase),
            torn=self.random.choice((None, self.random.random())),
            **fields,
        )

    def _passage(self, phase: Phase) -> int:
        """Draw a moment that was not drawn yet. When all were drawn, begin again."""
        if not self._decks.get(phase):
            num_passages = PASSAGES.get(phase, NUM_EXPORT_PASSAGES)
            self._decks[phase] = self.random.sample(range(1, num_passages + 1), num_passages)
        return self._decks[phase].pop()


def _digest(ending: Ending) -> str:
    finished = ending.of("finished")
    if finished is None:
        raise AssertionError(f"a run without any fault ends with {ending.output}")
    return str(finished["digest"])


Kind = Callable[[Runs], Attempt]
