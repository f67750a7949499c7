"""Results of runs that several processes share: a file for each run, and one file of JSON lines for a record."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def claim(folder: Path, run: dict[str, Any]) -> Path | None:
    """Make an empty file for a run and return its path, or None if it exists: finished, or of another process.

    A process that was killed leaves an empty file. Delete it before the next start.
    """
    path = folder / (re.sub(r"[^\w.]+", "-", " ".join(map(str, run.values()))) + ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return None
    return path


def write(path: Path, run: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the result of a run whose path `claim` returned."""
    path.write_text(json.dumps(run | result) + "\n")


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs and results of a folder, or of the record `<folder>.jsonl`. Unfinished ones are left out."""
    record = folder.with_suffix(".jsonl")
    for path in [*([record] if record.exists() else ()), *sorted(folder.glob("*.json"))]:
        yield from map(json.loads, path.read_text().splitlines())


def write_record(path: Path, results: list[dict[str, Any]]) -> None:
    """Write one line for each result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in results))
