"""Reads the files of `RunReport`, and compares several runs in a table."""

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from zeroamp.policies.errors import CheckpointError, printable
from zeroamp.reporting.step_record import PARTS, StepRecord
from zeroamp.reporting.tables import Row, TableStyle, render
from zeroamp.weights.untrusted_files import open_regular

logger = logging.getLogger("zeroamp")

_MAX_LINE_BYTES = 16 * 1024**2
NUM_WARM_UP = 1
"""Steps that medians leave out, if the run has more: the first step allocates."""

Number = Callable[[StepRecord], float | None]


@dataclass(kw_only=True, slots=True)
class SavedRun:
    """The header, steps and warnings in a run's file."""

    name: str
    """The file's name without its suffix."""
    headers: list[dict[str, Any]] = field(default_factory=list)
    """One per start of the run: the first start, and each resume."""
    records: list[StepRecord] = field(default_factory=list)
    """Records in the order of steps. After a resume from a checkpoint, the repeated steps replace the lost ones."""
    warnings: list[tuple[str, str]] = field(default_factory=list)
    """(name, text)."""
    num_unreadable: int = 0
    """Lines that RunReport did not write, or that a crash cut."""


def read_run(path: str | os.PathLike[str]) -> SavedRun:
    """Read the file of a `RunReport`, also during the run. Unreadable lines are skipped with a warning.

    Raises:
        CheckpointError: the file cannot be read, or `RunReport` did not write it.
    """
    path = Path(path)
    run = SavedRun(name=path.stem)
    try:
        with open_regular(path) as file:
            lines = iter(lambda: file.readline(_MAX_LINE_BYTES), b"")
            unreadable = [number for number, line in enumerate(lines, start=1) if not _read_line(run, line)]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Name a file that RunReport wrote.") from error
    run.num_unreadable = len(unreadable)
    if unreadable:
        what = "1 line is" if len(unreadable) == 1 else f"{len(unreadable):,} lines are"
        logger.warning("%s, from line %d: %s skipped: cut, or not written by RunReport", path, unreadable[0], what)
    if not run.headers:
        raise CheckpointError(
            f"{path} has no header of a RunReport. Name a file that zeroamp.RunReport wrote. Around a loop, use "
            'with zeroamp.RunReport(train, "run.jsonl"). In a Trainer, construct it in the on_train_begin of a '
            "callback: docs/instruments.md."
        )
    return run


def _read_line(run: SavedRun, line: bytes) -> bool:
    """Add the content of a line to the run. Return False if it is not a line of a RunReport."""
    try:
        values = json.loads(line.decode(errors="replace"), parse_constant=str, parse_float=_float_or_text)
        kind = values["kind"]
        record = StepRecord.from_json(values) if kind == "step" else None
        if kind == "header" and not isinstance(values.get("plan", {}), dict):
            raise TypeError("a header whose plan is not an object")
        if kind == "warning" and not isinstance(values.get("name", ""), str):
            raise TypeError("a warning whose name is not a string")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False
    if kind == "header":
        run.headers.append(values)
    elif kind == "warning":
        run.warnings.append((values.get("name", ""), values.get("text", "")))
    elif record is not None:
        while run.records and _is_lost(run.records[-1], record):
            run.records.pop()
        run.records.append(record)
    return True


def _float_or_text(text: str) -> float | str:
    """Return a number of a file, or its text if no float holds it: strict JSON has no infinity."""
    return number if math.isfinite(number := float(text)) else text


def _is_lost(last: StepRecord, new: StepRecord) -> bool:
    """Return whether the run was resumed from before `last`, if the file has `new` right after `last`.

    Each step increments `step` (taken) or `num_skipped`. Neither decreases without a resume. In files without
    num_skipped, the same `step` again is a resume if it was taken, since a skipped step does not increment it.
    """
    if last.num_skipped is None or new.num_skipped is None:
        return last.step > new.step or (last.step == new.step and not new.skipped)
    is_same = (last.step, last.num_skipped) == (new.step, new.num_skipped)
    return is_same or last.step > new.step or last.num_skipped > new.num_skipped


def table(runs: Sequence[SavedRun], style: TableStyle = "simple") -> str:
    """Return a table as text, with a column per run. Medians leave out the first step."""
    return printable(render(_rows(runs), style, names=_unique([run.name for run in runs])))


def _rows(runs: Sequence[SavedRun]) -> list[Row]:
    columns = [_summary(run) for run in runs]
    names = _unique([run.name for run in runs])
    return [
        {"": label, **{name: column[label] for name, column in zip(names, columns, strict=True)}}
        for label in columns[0]
        if any(column[label] != "-" for column in columns)
    ]


def runs_to_dict(runs: Sequence[SavedRun]) -> dict[str, Any]:
    """Return a JSON-serializable dict: the rows of the table, and each run's headers, records and warnings.

    Keys are stable; new ones may be added. Non-finite numbers are strings.
    """
    return {
        "summary": _rows(runs),
        "runs": [
            {
                "name": name,
                "headers": run.headers,
                "records": [record.to_json() for record in run.records],
                "warnings": [{"name": warning, "text": text} for warning, text in run.warnings],
                "num_unreadable": run.num_unreadable,
            }
            for name, run in zip(_unique([run.name for run in runs]), runs, strict=True)
        ],
    }


def _summary(run: SavedRun) -> dict[str, str]:
    """Return one run's column of the table as label -> text; "-" if a number is unknown."""
    plan, taken = run.headers[-1].get("plan", {}), [record for record in run.records if not record.skipped]
    steady = run.records[NUM_WARM_UP:] or run.records
    losses = [record.loss for record in taken]
    tokens = [record.num_tokens for record in run.records if record.num_tokens is not None]
    return {
        "ranks, device": f"{run.headers[-1].get('world_size', '?')}, {run.headers[-1].get('device', '?')}",
        "mode, stage": f"{plan.get('mode', '?')}, {plan.get('stage', '?')}",
        "steps (skipped)": f"{len(taken):,} ({len(run.records) - len(taken):,})",
        "tokens": _number(sum(tokens) if tokens else None, "{:,.0f}"),
        "loss, first": _number(losses[0] if losses else None, "{:.4f}"),
        "loss, last": _number(losses[-1] if losses else None, "{:.4f}"),
        "gradient norm, median": _median(taken, lambda r: r.grad_norm, "{:.4g}"),
        "tokens/s, median": _median(steady, lambda r: r.tokens_per_s, "{:,.0f}"),
        "model TFLOP/s per rank": _median(steady, lambda r: r.flops_per_s_per_rank, "{:.4g}", 1e-12),
        "MFU, median": _median(steady, lambda r: r.mfu, "{:.1%}"),
        "ms per step, median": _median(steady, lambda r: r.step_s, "{:,.1f}", 1e3),
        # A dash marks the parts of the step: tables strip leading spaces.
        **{f"- {part.replace('_', ' ')}": _share(steady, part) for part in PARTS},
        "GB communicated per step": _median(steady, lambda r: float(sum(r.traffic_bytes.values())), "{:,.3f}", 1e-9),
        "peak GiB, active": _last(run, lambda r: r.peak_active_gib),
        "peak GiB, reserved": _last(run, lambda r: r.peak_reserved_gib),
        "peak GiB, host process": _last(run, lambda r: r.peak_rss_gib),
        "allocator flushes": _number(run.records[-1].num_alloc_retries if run.records else None, "{:,}"),
        "warnings": ", ".join(sorted({name for name, _ in run.warnings})) or "none",
        "starts": f"{len(run.headers)}",
    }


def _share(records: Sequence[StepRecord], part: str) -> str:
    whole = sum(record.step_s for record in records)
    seconds = sum(getattr(record, f"{part}_s") for record in records)
    return f"{seconds / whole:.1%}" if whole else "-"


def _median(records: Sequence[StepRecord], number: Number, form: str, factor: float = 1.0) -> str:
    known = [value for record in records if (value := number(record)) is not None and math.isfinite(value)]
    return _number(median(known) * factor if known else None, form)


def _last(run: SavedRun, number: Number) -> str:
    return _number(number(run.records[-1]) if run.records else None, "{:.2f}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number where several runs have the same name."""
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
