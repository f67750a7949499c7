"""Reads Chrome traces of `torch.profiler`: sums the times of zeroamp's labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zeroamp.hooks.observers.trace_labels import LABEL_PREFIX
from zeroamp.reporting.tables import render

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelTimes:
    """Count and total time of one label in a trace. Times include nested labels."""

    name: str
    calls: int
    total_ms: float
    """Host time. With an accelerator it is the time to launch the work."""
    device_ms: float | None
    """Accelerator time, from the first to the last kernel of each label. None if the trace has no kernels."""

    @property
    def mean_ms(self) -> float:
        """`total_ms` per call."""
        return self.total_ms / self.calls


def label_times(events: Iterable[Event]) -> list[LabelTimes]:
    """Return the times of zeroamp's labels, summed by name, the longest total first."""
    host: dict[str, list[float]] = {}
    device: dict[str, float] = {}
    for event in events:
        name = event.get("name", "")
        if event.get("ph") != "X" or not name.startswith(LABEL_PREFIX):
            continue
        if event["cat"] == "gpu_user_annotation":
            device[name] = device.get(name, 0.0) + event["dur"] / 1000
        else:
            host.setdefault(name, []).append(event["dur"] / 1000)
    rows = [
        LabelTimes(name=name, calls=len(times), total_ms=sum(times), device_ms=device.get(name))
        for name, times in host.items()
    ]
    return sorted(rows, key=lambda row: -row.total_ms)


def render_times(times: Sequence[LabelTimes]) -> str:
    """Return the times as a table, in milliseconds."""
    with_device = any(row.device_ms is not None for row in times)
    return render(
        [
            {
                "label": row.name,
                "calls": row.calls,
                "total_ms": f"{row.total_ms:.2f}",
                "mean_ms": f"{row.mean_ms:.2f}",
                **({"device_ms": "" if row.device_ms is None else f"{row.device_ms:.2f}"} if with_device else {}),
            }
            for row in times
        ]
    )
