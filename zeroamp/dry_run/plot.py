"""Plots the memory over an optimizer step, one panel per stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zeroamp.dry_run.timeline import KINDS, LABELS, PHASES, Phase, Timeline
from zeroamp.reporting.files import new_figure, save_figure

if TYPE_CHECKING:
    from zeroamp.dry_run.run_plan import RunPlan, StagePlan

_NUM_POINTS: dict[Phase, int] = {"forward": 100, "backward": 150, "optimizer": 100}
"""Points of each stretch in a panel. Each point shows its event with the most memory, so that a short peak is visible.
"""

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#F0E442", "#999999", "#000000")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive events of one phase."""

    phase: Phase
    events: npt.NDArray[np.intp]
    """Their indices in the timeline, in order."""
    micro_batch: str
    """Name of its micro-batch, if the step has several and this is the first stretch of one; else ""."""


def plot_run(run: RunPlan, path: Path) -> None:
    """Write the plot to a file. See `RunPlan.plot`."""
    drawn = [stretches(stage.memory) for stage in run.stages]
    width = sum(max(4.2, 0.75 * len(of_stage)) for of_stage in drawn) + 2.2
    figure = new_figure(path, width=width, height=4.4)
    axes = figure.subplots(1, len(run.stages), squeeze=False)[0]
    for axis, stage, of_stage in zip(axes, run.stages, drawn, strict=True):
        _panel(axis, stage.memory, of_stage, run.gpu.memory_bytes)
        axis.set_title(f"stage {stage.stage}: peak {stage.memory.peak_bytes() / 2**30:.1f} GiB")
    axes[0].set_ylabel("GiB on one rank")
    # Only a panel whose axis reaches the GPU's memory has a line for it: take the longest legend.
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    checkpointing = "with" if run.checkpointing else "without"
    figure.suptitle(
        f"Memory over one step: {run.world_size} ranks, batch {run.batch} x {run.seq}, {checkpointing} checkpointing"
    )
    save_figure(figure, path, dpi=130)


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
            {"kind": str(kind), "label": LABELS[kind], "bytes": memory.num_bytes[rows, index].tolist()}
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


def _panel(axis: Any, memory: Timeline, drawn: list[Stretch], limit: int) -> None:
    totals = memory.device_bytes()
    rows = [row for stretch in drawn for row in _points(totals, stretch)]
    gib = memory.num_bytes[rows] / 2**30
    on_device = [index for index, kind in enumerate(KINDS) if kind not in memory.on_host]
    axis.stackplot(
        np.arange(len(rows)),
        gib[:, on_device].T,
        labels=[LABELS[KINDS[index]] for index in on_device],
        colors=[_COLOURS[index] for index in on_device],
        step="post",
        linewidth=0,
    )
    peak = max(totals[rows]) / 2**30
    axis.set_ylim(0, 1.2 * peak)  # the names of the stretches are above the memory
    if limit / 2**30 <= 1.2 * peak:  # else the line would be far above, and flatten the panel
        axis.axhline(limit / 2**30, color="black", linestyle="--", linewidth=1, label="the GPU's memory")
    at = int(np.argmax(totals[rows]))
    axis.plot([at], [peak], marker="v", color="black", markersize=6, clip_on=False, label="peak")
    begin = 0
    has_several = any(stretch.micro_batch for stretch in drawn)
    for stretch in drawn:
        words = f" {stretch.micro_batch}\n {stretch.phase}" if has_several else f" {stretch.phase}"
        is_inside = has_several and stretch.phase == "backward"  # then the name of the micro-batch is above it
        axis.axvline(begin, ymax=0.95 if is_inside else 1, color="black", linewidth=0.5, alpha=0.5)
        axis.text(begin, 1.0, words, transform=axis.get_xaxis_transform(), va="top", fontsize=8)
        begin += _NUM_POINTS[stretch.phase]
    axis.set_xlim(0, len(rows) - 1)
    axis.set_xlabel("allocations and frees, in order")
    axis.set_xticks([])


def _points(totals: npt.NDArray[np.int64], stretch: Stretch) -> list[int]:
    """Return the indices of the events to draw for a stretch, in order."""
    number = _NUM_POINTS[stretch.phase]
    parts = np.array_split(stretch.events, min(number, len(stretch.events)))
    largest = [int(part[totals[part].argmax()]) for part in parts]
    return [largest[index * len(largest) // number] for index in range(number)]
