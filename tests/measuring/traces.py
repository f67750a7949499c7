"""Reads traces of torch.profiler back."""

import json
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

PREFIX = "zeroamp::"
ROUNDING_US = 0.005  # a float64 of a trace's clock resolves 0.001


def recorded(body, *args):
    """Run `body(*args)` under torch.profiler; return the complete events of its trace."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        body(*args)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return complete(json.loads(Path(f"{folder}/trace.json").read_text()))


def complete(trace):
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def ours(events):
    """zeroamp's labels, in the order in which they begin, their names without the prefix."""
    found = [{**event, "name": event["name"][len(PREFIX) :]} for event in events if event["name"].startswith(PREFIX)]
    return sorted(found, key=lambda event: event["ts"])


def names(events):
    return [event["name"] for event in ours(events)]


def end(event):
    return event["ts"] + event["dur"]


def is_inside(inner, outer):
    return outer["ts"] <= inner["ts"] + ROUNDING_US and end(inner) <= end(outer) + ROUNDING_US


def crossing(events):
    """Pairs of names of events on one thread of which each begins or ends inside the other only."""
    found, stacks = [], {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        stack = stacks.setdefault((event["pid"], event["tid"]), [])
        while stack and end(stack[-1]) <= event["ts"] + ROUNDING_US:
            stack.pop()
        if stack and not is_inside(event, stack[-1]):
            found.append((stack[-1]["name"], event["name"]))
        stack.append(event)
    return found
