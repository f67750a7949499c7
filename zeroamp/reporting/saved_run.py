"""Reads what `RunReport` wrote."""

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.reporting.record import StepRecord

logger = logging.getLogger("zeroamp")


@dataclass(kw_only=True, slots=True)
class SavedRun:
    """A run as its file has it."""

    name: str
    """Of the file, without its suffix."""
    headers: list[dict[str, Any]] = field(default_factory=list)
    """One per start of the run: the first, and one per time that it was gone on with."""
    records: list[StepRecord] = field(default_factory=list)
    """By step. Where a run went on from a checkpoint, the steps that it took again replace those that it lost."""
    warnings: list[tuple[str, str]] = field(default_factory=list)
    """(name, text)."""
    num_unreadable: int = 0
    """Lines that are none of a RunReport: one that a crash cut."""


def read_run(path: str | os.PathLike[str]) -> SavedRun:
    """Read the file of a `RunReport`, of a run that still goes on too. A line that was cut is left out, with a note.

    Raises:
        CheckpointError: the file cannot be read, or is none of a RunReport.
    """
    path = Path(path)
    run = SavedRun(name=path.stem)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            unreadable = [number for number, line in enumerate(file, start=1) if not _read_line(run, line)]
    except OSError as error:
        found = f"no readable file ({error.strerror})"
        raise CheckpointError(describe(str(path), found, "a file that RunReport wrote", "Check the path.")) from error
    run.num_unreadable = len(unreadable)
    if unreadable:
        what = "1 line is" if len(unreadable) == 1 else f"{len(unreadable):,} lines are"
        logger.warning("%s, from line %d: %s left out: cut, or none of a RunReport", path, unreadable[0], what)
    if not run.headers:
        found = "no header of a RunReport"
        raise CheckpointError(describe(str(path), found, "a file that RunReport wrote", "Check the path."))
    return run


def _read_line(run: SavedRun, line: str) -> bool:
    """Add what a line says, if it is one of a RunReport; return whether it is."""
    try:
        values = json.loads(line)
        kind = values["kind"]
        record = StepRecord.from_json(values) if kind == "step" else None
        if kind == "header" and not isinstance(values.get("plan", {}), dict):
            raise TypeError("a header whose plan is none")
        if kind == "warning" and not isinstance(values.get("name", ""), str):
            raise TypeError("a warning whose name is none")
    except (ValueError, TypeError, KeyError):
        return False
    if kind == "header":
        run.headers.append(values)
    elif kind == "warning":
        run.warnings.append((values.get("name", ""), values.get("text", "")))
    elif record is not None:
        _add(run, record)
    return True


def _add(run: SavedRun, record: StepRecord) -> None:
    """Add a step in the place of those that were lost when the run went back to before it."""
    while run.records and _is_lost(run.records[-1], record):
        run.records.pop()
    run.records.append(record)


def _is_lost(last: StepRecord, new: StepRecord) -> bool:
    """Return whether the run went back to before `last`, if `new` follows it in the file.

    Each step adds one to those taken (`step`) or to those skipped, and neither falls but by going back. Without
    num_skipped only `step` tells: the same again is a return if it was taken, since a skipped step leaves it.
    """
    if last.num_skipped is None or new.num_skipped is None:
        return last.step > new.step or (last.step == new.step and not new.skipped)
    is_same = (last.step, last.num_skipped) == (new.step, new.num_skipped)
    return is_same or last.step > new.step or last.num_skipped > new.num_skipped
