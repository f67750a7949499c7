"""Reads Chrome traces of `torch.profiler`: sums the times of zeroamp's ranges, and makes backward ranges nest."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zeroamp.hooks.observers.ranges import RANGE_PREFIX
from zeroamp.policies.tables import render

Event = dict[str, Any]

_NODE = "autograd::engine::evaluate_function: "
_STEP_US = 0.01  # ten times the resolution of a trace's float64 clock, and far below the time between two nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeTimes:
    """Count and total time of all ranges with one name in a trace. Times include nested ranges."""

    name: str
    calls: int
    total_ms: float
    """Host time. With an accelerator it is the time to launch the work."""
    device_ms: float | None
    """Accelerator time, from the first to the last kernel of each range. None if the trace has no kernels."""

    @property
    def mean_ms(self) -> float:
        """`total_ms` per call."""
        return self.total_ms / self.calls


def range_times(events: Iterable[Event]) -> list[RangeTimes]:
    """Return the times of zeroamp's ranges, summed by name, the longest total first."""
    host: dict[str, list[float]] = {}
    device: dict[str, float] = {}
    for event in events:
        name = event.get("name", "")
        if event.get("ph") != "X" or not name.startswith(RANGE_PREFIX):
            continue
        if event["cat"] == "gpu_user_annotation":
            device[name] = device.get(name, 0.0) + event["dur"] / 1000
        else:
            host.setdefault(name, []).append(event["dur"] / 1000)
    rows = [
        RangeTimes(name=name, calls=len(times), total_ms=sum(times), device_ms=device.get(name))
        for name, times in host.items()
    ]
    return sorted(rows, key=lambda row: -row.total_ms)


def render_times(times: Sequence[RangeTimes]) -> str:
    """Return the times as a table, in milliseconds."""
    with_device = any(row.device_ms is not None for row in times)
    return render(
        [
            {
                "range": row.name,
                "calls": row.calls,
                "total_ms": f"{row.total_ms:.2f}",
                "mean_ms": f"{row.mean_ms:.2f}",
                **({"device_ms": "" if row.device_ms is None else f"{row.device_ms:.2f}"} if with_device else {}),
            }
            for row in times
        ]
    )


def nest_backwards(events: Iterable[Event]) -> None:
    """Make backward ranges nest with autograd's events, in place.

    The start or end of a range that lies inside an autograd node's event moves to just before that event. Several of
    them within one node keep their order. See [Note: Backward ranges] in `hooks/observers/ranges.py`.
    """
    nodes: dict[tuple[Any, Any], list[Event]] = {}
    ranges: list[Event] = []
    for event in events:
        if event.get("ph") == "X" and event["name"].startswith(_NODE):
            nodes.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event.get("cat") == "user_annotation" and event["name"].startswith(f"{RANGE_PREFIX}backward "):
            ranges.append(event)
    for thread, inside in nodes.items():
        inside.sort(key=lambda event: event["ts"])
        _move_ends([event for event in ranges if (event["pid"], event["tid"]) == thread], inside)


def _move_ends(ranges: Sequence[Event], nodes: Sequence[Event]) -> None:
    ends = sorted(
        [(event["ts"], index, True) for index, event in enumerate(ranges)]
        + [(event["ts"] + event["dur"], index, False) for index, event in enumerate(ranges)]
    )
    starts = [node["ts"] for node in nodes]
    by_node: dict[int, list[tuple[int, bool]]] = {}
    for time, index, is_begin in ends:
        node = _innermost(time, starts, nodes)
        if node is not None:
            by_node.setdefault(node, []).append((index, is_begin))
    for node, moved in by_node.items():
        for place, (index, is_begin) in enumerate(moved):
            event, moment = ranges[index], nodes[node]["ts"] - (len(moved) - place) * _STEP_US
            end = event["ts"] + event["dur"]
            if is_begin:
                event["ts"] = round(moment, 3)
            event["dur"] = round((end if is_begin else moment) - event["ts"], 3)


def _innermost(time: float, starts: Sequence[float], nodes: Sequence[Event]) -> int | None:
    """Return the index of the last node that begins before `time` and ends after it."""
    for index in range(bisect_right(starts, time) - 1, -1, -1):
        if nodes[index]["ts"] + nodes[index]["dur"] > time:
            return index
    return None
