"""Chooses the points that the page of a plan draws of the memory over an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zeroamp.dry_run.timeline import KINDS, PHASES, Phase, Timeline

if TYPE_CHECKING:
    from zeroamp.dry_run.run_plan import StagePlan

_NUM_POINTS: dict[Phase, int] = {"forward": 100, "backward": 150, "optimizer": 100}
"""Points of each stretch in a panel. Each point shows its event with the most memory, so that a short peak is visible.
"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive events of one phase."""

    phase: Phase
    events: npt.NDArray[np.intp]
    """Their indices in the timeline, in order."""
    micro_batch: str
    """Name of its micro-batch, if the step has several and this is the first stretch of one; else ""."""


def drawn_timeline(stage: StagePlan) -> dict[str, Any]:
    """Return what a stage's panel shows, as a dict for JSON: the stretches, and the bytes at each point."""
    memory = stage.memory
    totals, of_stage = memory.device_bytes(), stretches(memory)
    rows = [row for stretch in of_stage for row in _points(totals, stretch)]
    begins = np.cumsum([0, *(_NUM_POINTS[stretch.phase] for stretch in of_stage)])[:-1]
    names = [f"{stretch.micro_batch} {stretch.phase}".strip() for stretch in of_stage]
    return {
        "stage": stage.stage,
        "stretches": [{"name": name, "begin": int(begin)} for name, begin in zip(names, begins, strict=True)],
        "total": totals[rows].tolist(),
        "kinds": [
            {"kind": str(kind), "bytes": memory.num_bytes[rows, index].tolist()}
            for index, kind in enumerate(KINDS)
            if kind not in memory.on_host
        ],
    }


def stretches(memory: Timeline) -> list[Stretch]:
    """Return the stretches of a timeline in order, without the "init" phase."""
    begins = np.flatnonzero(np.diff(memory.phases)) + 1
    parts = np.split(np.arange(len(memory.phases)), begins)
    phases = [PHASES[memory.phases[part[0]]] for part in parts]
    names = _micro_batches(phases.count("forward"))
    found = []
    for phase, events in zip(phases, parts, strict=True):
        if phase != "init":
            found.append(Stretch(phase, events, names.pop(0) if phase == "forward" else ""))
    return found


def _micro_batches(number: int) -> list[str]:
    """Return names for the micro-batches that are replayed, see `MAX_MICRO_BATCHES`."""
    if number == 1:
        return [""]
    return [f"{name} micro-batch" for name in ("first", *["middle"] * (number - 2), "last")]


def _points(totals: npt.NDArray[np.int64], stretch: Stretch) -> list[int]:
    """Return the indices of the events to draw for a stretch, in order."""
    number = _NUM_POINTS[stretch.phase]
    parts = np.array_split(stretch.events, min(number, len(stretch.events)))
    largest = [int(part[totals[part].argmax()]) for part in parts]
    return [largest[index * len(largest) // number] for index in range(number)]
