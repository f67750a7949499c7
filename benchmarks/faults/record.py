"""Writes the record of a campaign: every attempt as JSON, and a table by kind of fault."""

import json
import os
import platform
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import zeroamp
from benchmarks.faults.attempt import Attempt

_DETAILS = re.compile(r"(?<=step )\d+|(?<=rank )\d|/\S*/|\[[\d.]+\]:\d+|step_\d+|-[0-9a-f]{8}\b|\d{3,}")
_TEXT = 160  # characters of an error in the table; `faults.json` has all of it


def write_record(out: Path, attempts: list[Attempt], skipped: dict[str, str], seconds: float) -> None:
    """Write `faults.json` and `faults.md` into a folder, and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    head = {
        "command": f"python -m benchmarks.fault_campaign {' '.join(sys.argv[1:])}",
        "versions": {"torch": torch.__version__, "zeroamp": zeroamp.__version__, "python": platform.python_version()},
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "seconds": round(seconds),
        "skipped": skipped,
        "num_attempts": len(attempts),
        "num_kills": sum(_num_kills(attempt) for attempt in attempts),
        "num_losses": sum(len(attempt.losses) for attempt in attempts),
    }
    rows = [_row(attempt) for attempt in attempts]
    (out / "faults.json").write_text(json.dumps({**head, "attempts": rows}, indent=1) + "\n")
    text = "\n\n".join(
        [f"`{head['command']}`: {_summary(head)}", _table(attempts), _moments(attempts), _errors(attempts)]
    )
    (out / "faults.md").write_text(text + "\n")
    print(text)


def _summary(head: dict[str, Any]) -> str:
    counts = f"{head['num_attempts']} attempts, {head['num_kills']} kills -9, **{head['num_losses']} losses**"
    skipped = "".join(f"\n\nNot tried: {kind} ({reason})." for kind, reason in head["skipped"].items())
    return f"{counts}, {head['seconds']} s, torch {head['versions']['torch']}.{skipped}"


def _num_kills(attempt: Attempt) -> int:
    return len(attempt.moments) if "kill" in attempt.kind else 0


def _row(attempt: Attempt) -> dict[str, Any]:
    names = ("kind", "story", "moments", "errors", "losses")
    values = {name: getattr(attempt, name) for name in names}
    return {**values, "job": asdict(attempt.job), "survivors_s": [round(s, 2) for s in attempt.survivors_s]}


def _table(attempts: list[Attempt]) -> str:
    rows = []
    for kind in dict.fromkeys(attempt.kind for attempt in attempts):
        ours = [attempt for attempt in attempts if attempt.kind == kind]
        starts = sum(text.startswith("from step") for attempt in ours for text in attempt.story)
        slowest = max((s for attempt in ours for s in attempt.survivors_s), default=None)
        bound = "" if slowest is None else f"{slowest:.1f}"
        rows.append([kind, len(ours), starts, bound, sum(len(attempt.losses) for attempt in ours)])
    headers = ["fault", "attempts", "starts", "slowest survivor, s", "losses"]
    return tabulate(rows, headers=headers, tablefmt="github")


def _moments(attempts: list[Attempt]) -> str:
    moments = Counter(_short(moment) for attempt in attempts for moment in attempt.moments if _num_kills(attempt))
    rows = sorted(moments.items())
    return "Where ranks were when they were killed:\n\n" + tabulate(
        rows, headers=["moment", "kills"], tablefmt="github"
    )


def _short(moment: str) -> str:
    """Shorten names that differ from run to run."""
    words = moment.partition(" | ")[2].removeprefix("in the background: ") or moment
    in_background = " (background)" if " | " in moment else ""
    head, _, name = words.rpartition(" ")
    for prefix in (".draft-", ".removed-", ".latest-", "step_"):
        if name.startswith(prefix):
            return f"{head} {prefix}…{in_background}"
    return words + in_background


def _errors(attempts: list[Attempt]) -> str:
    texts = Counter(_DETAILS.sub("…", error)[:_TEXT] for attempt in attempts for error in attempt.errors)
    rows = [[count, text] for text, count in texts.most_common()]
    return "Errors of ranks that were not struck:\n\n" + tabulate(rows, headers=["times", "text"], tablefmt="github")
