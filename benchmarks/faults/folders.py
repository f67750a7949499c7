"""Folders in another state than expected: another number of ranks or stage resumes, or foreign files are inside."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.attempt import Attempt, Runs
from benchmarks.faults.moments import Phase

_BEFORE: tuple[Phase, ...] = ("backward", "step", "save", "publish")


def resharded(runs: Runs) -> Attempt:
    """Kill a rank, resume with another number of ranks or another stage, and kill one of those ranks.

    The loaded full parameters and optimizer states must be those that were saved. The steps after that must be those of
    a run without faults from a copy of the folder.
    """
    first = runs.job(logs_state=True, save_every=1)
    attempt = runs.attempt("kill -9, other ranks or stage next", first)
    attempt.story.append(f"begun with {first}")
    attempt.run(num_steps=runs.random.randint(1, first.num_steps - 2))
    attempt.run(runs.strike(first, runs.random.choice(_BEFORE)))
    shapes = [(n, stage) for n in (1, 2, 3, 4) for stage in range(4) if (n, stage) != (first.num_ranks, first.stage)]
    num_ranks, stage = runs.random.choice(shapes)
    second = replace(first, num_ranks=num_ranks, stage=stage)
    copy = runs.place()
    shutil.copytree(attempt.place.folder, copy.folder)
    attempt.job, attempt.oracle = second, runs.faultless(second, copy)
    attempt.story.append(f"gone on with {second}")
    attempt.run(runs.strike(second))
    attempt.finish()
    return attempt


def shared_with_strangers(runs: Runs) -> Attempt:
    """Put foreign files and folders beside the checkpoints: all of them must stay, and the run must be unaffected."""
    job = runs.job(save_every=1)
    attempt = runs.attempt("kill -9 beside foreign files", job)
    attempt.run(num_steps=runs.random.randint(1, job.num_steps - 1))
    folder = attempt.place.folder
    before = set(folder.iterdir())
    _put_strangers(folder)
    strangers = set(folder.iterdir()) - before
    attempt.foreign = {path.name for path in strangers}
    contents = {path: _content(path) for path in strangers}
    attempt.run(runs.strike(job))
    attempt.finish()
    changed = [path.name for path, content in contents.items() if _content(path) != content]
    attempt.lost(bool(changed), f"files of others are changed or gone: {changed}")
    return attempt


def _put_strangers(folder: Path) -> None:
    """Create files and folders that a user, an editor, a file system or another program might create."""
    newest = next(folder.glob("step_*"))
    shutil.copytree(newest, folder / f"{newest.name}.bak")
    shutil.copytree(newest, folder / "best")
    for name in ("notes.txt", ".DS_Store", "latest.swp", ".nfs000000000001", "step_00000050", ".draft-notes"):
        (folder / name).write_text("of somebody else")
    for name in ("lost+found", "checkpoint-500", "step_best", ".ipynb_checkpoints", "runs"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("of somebody else")
    (folder / "current").symlink_to(newest.name)
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")


def _content(path: Path) -> object:
    """Return the content of a path, for a later comparison; None if it does not exist."""
    if path.is_symlink():
        return path.readlink()
    if path.is_dir():
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    if path.is_fifo():
        return "a FIFO"
    return path.read_bytes() if path.is_file() else None
