"""A picture of the memory over a step, one panel per stage."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroamp.dry_run.timeline import KINDS, PHASES, Phase, Timeline
from zeroamp.policies.errors import ConfigError, describe

if TYPE_CHECKING:
    from zeroamp.dry_run.run_plan import RunPlan

_NUM_POINTS: dict[Phase, int] = {"forward": 100, "backward": 150, "optimizer": 50}
"""Of each phase in a panel. Of the events that fall on one point the one with the largest sum is drawn, so that a peak
that is over after a few events is as wide as any other."""

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#F0E442", "#999999", "#000000")


def plot_run(run: RunPlan, path: Path) -> None:
    """Write the picture. See `RunPlan.plot`."""
    matplotlib = _matplotlib()
    figure = matplotlib.figure.Figure(figsize=(4.2 * len(run.stages) + 2.2, 4.4), layout="constrained")
    axes = figure.subplots(1, len(run.stages), sharey=True, squeeze=False)[0]
    for axis, stage in zip(axes, run.stages, strict=True):
        _panel(axis, stage.memory, run.gpu.memory_bytes)
        axis.set_title(f"stage {stage.stage}: peak {stage.memory.peak_bytes() / 2**30:.1f} GiB")
    axes[0].set_ylabel("GiB on one rank")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    checkpointing = "with" if run.checkpointing else "without"
    figure.suptitle(
        f"Memory over one step: {run.world_size} ranks, batch {run.batch} x {run.seq}, {checkpointing} checkpointing"
    )
    figure.savefig(path, dpi=130)


def _matplotlib() -> Any:
    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ConfigError(
            describe("plot", "no matplotlib", "matplotlib 3.8 or newer", "pip install zeroamp[plot]")
        ) from error


def _panel(axis: Any, memory: Timeline, limit: int) -> None:
    drawn = {phase: _points(memory, phase, number) for phase, number in _NUM_POINTS.items()}
    rows = [row for of_phase in drawn.values() for row in of_phase]
    gib = memory.num_bytes[rows] / 2**30
    on_device = [index for index, kind in enumerate(KINDS) if kind not in memory.on_host]
    axis.stackplot(
        np.arange(len(rows)),
        gib[:, on_device].T,
        labels=[KINDS[index] for index in on_device],
        colors=[_COLOURS[index] for index in on_device],
        step="post",
        linewidth=0,
    )
    axis.axhline(limit / 2**30, color="black", linestyle="--", linewidth=1, label="the GPU's memory")
    begin = 0
    for phase, of_phase in drawn.items():
        axis.axvline(begin, color="black", linewidth=0.5, alpha=0.5)
        axis.text(begin, 1.0, f" {phase}", transform=axis.get_xaxis_transform(), va="top", fontsize=8)
        begin += len(of_phase)
    axis.set_xlim(0, len(rows) - 1)
    axis.set_xlabel("allocations and frees, in order")
    axis.set_xticks([])


def _points(memory: Timeline, phase: Phase, number: int) -> list[int]:
    """Return the numbers of the events to draw for a phase, in order."""
    totals = memory.device_bytes()
    events = np.flatnonzero(memory.phases == PHASES.index(phase))
    parts = np.array_split(events, min(number, len(events)))
    largest = [int(part[totals[part].argmax()]) for part in parts]
    return [largest[index * len(largest) // number] for index in range(number)]
