"""Reads the files of `RunReport`, and compares several runs in a table."""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from zeroamp.policies.errors import CheckpointError
from zeroamp.policies.numbers import size_text
from zeroamp.reporting.step_record import PARTS, StepRecord
from zeroamp.reporting.tables import Row, headed, render
from zeroamp.weights.untrusted_files import open_regular

logger = logging.getLogger("zeroamp")

RATES = ("learning rate, first", "learning rate, largest")
"""Rows of the table, which also count as settings: a scheduler's rates are not in the config."""
_MAX_LINE_BYTES = 16 * 1024**2


@dataclass(kw_only=True, slots=True)
class SavedRun:
    """The headers and steps in a run's file."""

    name: str
    """The file's name without its suffix."""
    folder: str = ""
    """The name of the file's folder."""
    headers: list[dict[str, Any]] = field(default_factory=list)
    """One per start of the run: the first start, and each resume."""
    records: list[StepRecord] = field(default_factory=list)
    """Records in the order of steps. After a resume from a checkpoint, the repeated steps replace the lost ones."""


def read_run(path: str | os.PathLike[str]) -> SavedRun:
    """Read the file of a `RunReport`, also during the run. Unreadable lines are skipped with a warning.

    Raises:
        CheckpointError: the file cannot be read, or `RunReport` did not write it.
    """
    path = Path(path)
    run = SavedRun(name=path.stem, folder=path.absolute().parent.name)
    try:
        with open_regular(path) as file:
            lines = enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1)
            unreadable = [number for number, line in lines if line.strip() and not _read_line(run, line)]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Name a file that RunReport wrote.") from error
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
        if values["kind"] == "header":
            run.headers.append({**values, "plan": dict(values.get("plan", {}))})
        elif values["kind"] == "step":
            record = StepRecord.from_json(values)
            while run.records and _is_lost(run.records[-1], record):
                run.records.pop()
            run.records.append(record)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False
    return True


def _float_or_text(text: str) -> float | str:
    """Return a number of a file, or its text if no float holds it: strict JSON has no infinity."""
    return number if math.isfinite(number := float(text)) else text


def _is_lost(last: StepRecord, new: StepRecord) -> bool:
    """Return whether the run was resumed from before `last`, if the file has `new` right after `last`.

    Each step increments `step` (taken) or `num_skipped`. Neither decreases without a resume.
    """
    is_same = (last.step, last.num_skipped) == (new.step, new.num_skipped)
    return is_same or last.step > new.step or last.num_skipped > new.num_skipped


def table(runs: Sequence[SavedRun]) -> str:
    """Return a table as text, with a column per run, and the settings that differ. Medians leave out the first step."""
    if len(runs) < 2:
        return render(_rows(runs))
    found = _differences(runs)
    same = "Config, optimizers, learning rates, versions, ranks and devices are the same in all runs."
    return f"{render(_rows(runs))}\n\n{headed('Settings that differ', found) if found else same}"


def _rows(runs: Sequence[SavedRun]) -> list[Row]:
    columns = dict(zip(_names(runs), map(_summary, runs), strict=True))
    rows = [{"": label, **{name: columns[name][label] for name in columns}} for label in _summary(runs[0])]
    return [row for row in rows if any(text != "-" for text in list(row.values())[1:])]


def _differences(runs: Sequence[SavedRun]) -> list[Row]:
    """Return a row per setting of the last headers, or learning rate, that is not the same in all runs."""
    settings = []
    for run in runs:
        header = {key: value for key, value in run.headers[-1].items() if key not in ("kind", "started", "plan")}
        rates = {name: _summary(run)[name] for name in RATES}
        settings.append({key: _text(value) for key, value in _flat(header).items()} | rates)
    keys = sorted({key for each in settings for key in each})
    rows = [{"": key, **dict(zip(_names(runs), (each.get(key) for each in settings), strict=True))} for key in keys]
    return [row for row in rows if len({*list(row.values())[1:]}) > 1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested dicts as one, whose keys are joined by dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def runs_to_dict(runs: Sequence[SavedRun]) -> dict[str, Any]:
    """Return a JSON-serializable dict: the rows of the tables, and each run's headers and records.

    Keys are stable; new ones may be added. Non-finite numbers are strings.
    """
    found = [
        {
            "name": name,
            "headers": run.headers,
            "records": [record.to_json() for record in run.records],
        }
        for name, run in zip(_names(runs), runs, strict=True)
    ]
    return {"summary": _rows(runs), "differences": _differences(runs), "runs": found}


def _summary(run: SavedRun) -> dict[str, str]:
    """Return one run's column of the table as label -> text; "-" if a number is unknown."""
    header, taken = run.headers[-1], [record for record in run.records if not record.skipped]
    steady = run.records[1:] or run.records  # the first step allocates
    last = run.records[-1:]

    def share(part: str) -> str:
        step_s = sum(each.step_s for each in steady)
        return f"{sum(getattr(each, f'{part}_s') for each in steady) / step_s:.1%}" if step_s else "-"

    versions = header.get("versions", {})
    return {
        "started": str(header.get("started", "-")),
        "zeroamp, torch": ", ".join(str(versions[name]) for name in ("zeroamp", "torch") if name in versions) or "-",
        "ranks, device": f"{header.get('world_size', '?')}, {header.get('device', '?')}",
        "mode, stage": f"{header['plan'].get('mode', '?')}, {header['plan'].get('stage', '?')}",
        "steps (skipped)": f"{len(taken):,} ({len(run.records) - len(taken):,})",
        "tokens": f"{tokens:,}" if (tokens := sum(each.num_tokens or 0 for each in run.records)) else "-",
        "loss, first": _median(taken[:1], "loss", "{:.4f}".format),
        "loss, last": _median(taken[-1:], "loss", "{:.4f}".format),
        "gradient norm, median": _median(taken, "grad_norm", "{:.4g}".format),
        **dict(zip(RATES, _rates(taken), strict=True)),
        "tokens/s, median": _median(steady, "tokens_per_s", "{:,.0f}".format),
        "ms per step, median": _median(steady, "step_s", "{:,.1f}".format, 1e3),
        # A dash marks the parts of the step: tables strip leading spaces.
        **{f"- {part.replace('_', ' ')}": share(part) for part in PARTS},
        "communicated per step": _median(steady, "communicated_bytes", size_text),
        "peak memory, active": _median(last, "peak_active_gib", size_text, 1024**3),
        "peak memory, reserved": _median(last, "peak_reserved_gib", size_text, 1024**3),
        "peak memory, host process": _median(last, "peak_rss_gib", size_text, 1024**3),
        "allocator flushes": _median(last, "num_alloc_retries", "{:,}".format),
        "starts": f"{len(run.headers)}",
    }


def _rates(taken: Sequence[StepRecord]) -> tuple[str, str]:
    """Return the first and the largest learning rate; if there are several param groups, the largest of them."""
    rates = [max(each.lr) for each in taken if each.lr]
    return (f"{rates[0]:.4g}", f"{max(rates):.4g}") if rates else ("-", "-")


def _median(records: Sequence[StepRecord], name: str, form: Callable[[float], str], factor: float = 1) -> str:
    """Return the median of an attribute of the records that have it, times the factor; of its finite values, if any."""
    known = [value for each in records if (value := getattr(each, name)) is not None]
    values = [value for value in known if math.isfinite(value)] or known
    return form(median(values) * factor) if values else "-"


def _names(runs: Sequence[SavedRun]) -> list[str]:
    """Return the names of the runs; with their folders if some are the same, and with a number where those are too."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.folder}/{run.name}" for run in runs]
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
