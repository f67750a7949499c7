"""Bytes of each kind that one rank holds, event by event, over one optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

MemoryKind = Literal[
    "parameters",
    "optimizer state",
    "gradients",
    "unsharded parameters",
    "communication buffers",
    "unsharded gradients",
    "activations",
    "workspace",
    "inputs and buffers",
]
"""parameters: the stored shards. gradients: gradient shards. unsharded parameters: whole ones, from their all-gather to
their reshard. unsharded gradients: raw ones before their reduction, and sums of several micro-batches at stages 0 and
1. communication buffers: inputs and outputs of collectives, and casts for them. activations: what the forward saves for
the backward. workspace: temporary memory of ops, recomputed activations included."""

KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
HOST_KINDS: tuple[MemoryKind, ...] = ("parameters", "optimizer state", "gradients")
"""Kinds that offloading moves to the CPU."""

RunPhase = Literal["init", "forward", "backward", "optimizer"]
PHASES: tuple[RunPhase, ...] = get_args(RunPhase)
_DRAWN_POINTS: dict[RunPhase, int] = {"forward": 100, "backward": 150, "optimizer": 100}
"""Points with which a page draws each forward, each backward and the update."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory of one rank after each event of a step after the first, which has optimizer state."""

    num_bytes: npt.NDArray[np.int64]
    """[events, kinds], in the order of `KINDS`: the bytes of each kind after each event."""
    phases: npt.NDArray[np.int8]
    """[events]: index into `PHASES`."""
    on_host: tuple[MemoryKind, ...] = ()
    """Kinds in host memory. They are in `num_bytes`, but do not count for peaks."""
    host_activations: int = 0
    """Bytes of activations in host memory. They are not in `num_bytes`."""

    def device_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes on the device after each event: [events]."""
        columns = [index for index, kind in enumerate(KINDS) if kind not in self.on_host]
        total: npt.NDArray[np.int64] = self.num_bytes[:, columns].sum(axis=1)
        return total

    def host_bytes(self) -> int:
        """Return the largest number of bytes that offload holds on the host."""
        columns = [KINDS.index(kind) for kind in self.on_host]
        return self.host_activations + (int(self.num_bytes[:, columns].sum(axis=1).max()) if columns else 0)

    def peak(self, phase: RunPhase | None = None) -> dict[MemoryKind, int]:
        """Return the bytes of each kind at the moment of the device's peak, in one phase or in the whole step."""
        totals = self.device_bytes()
        if phase is not None:
            totals = np.where(self.phases == PHASES.index(phase), totals, -1)
        row = self.num_bytes[int(totals.argmax())]
        return {kind: int(value) for kind, value in zip(KINDS, row, strict=True)}

    def peak_bytes(self, phase: RunPhase | None = None) -> int:
        """Return the peak bytes on the device, in one phase or in the whole step."""
        return sum(value for kind, value in self.peak(phase).items() if kind not in self.on_host)

    def drawn(self) -> dict[str, Any]:
        """Return what a page draws, as a dict for JSON: forwards, backwards, the update, and the bytes at each point.

        Each point shows its event with the most memory, so that a short peak is visible.
        """
        totals = self.device_bytes()
        stretches, rows = list[dict[str, Any]](), list[int]()
        for events in np.split(np.arange(len(totals)), np.flatnonzero(np.diff(self.phases)) + 1):
            phase = PHASES[self.phases[events[0]]]
            if phase == "init":
                continue
            stretches.append({"name": phase, "begin": len(rows)})
            bounds = np.linspace(0, len(events), _DRAWN_POINTS[phase] + 1, dtype=int).tolist()
            for begin, end in pairwise(bounds):
                part = events[begin : max(end, begin + 1)]
                rows.append(int(part[totals[part].argmax()]))
        kinds = {str(kind): column for column, kind in enumerate(KINDS) if kind not in self.on_host}
        return {
            "stretches": stretches,
            "total": totals[rows].tolist(),
            "kinds": [{"kind": kind, "bytes": self.num_bytes[rows, column].tolist()} for kind, column in kinds.items()],
        }


class TimelineWriter:
    """Adds and subtracts bytes, and writes a row of the totals after each change."""

    def __init__(self) -> None:
        self.phase: RunPhase = "init"
        self._now = [0] * len(KINDS)
        self._rows: list[tuple[int, ...]] = []
        self._phases: list[int] = []

    def add(self, kind: MemoryKind, num_bytes: int) -> None:
        """Add bytes of a kind; a negative number subtracts."""
        if num_bytes:
            self._now[KINDS.index(kind)] += num_bytes
            self.add_row()

    def add_and_free(self, kind: MemoryKind, num_bytes: int) -> None:
        """Add bytes that exist for a moment only."""
        self.add(kind, num_bytes)
        self.add(kind, -num_bytes)

    def add_row(self) -> None:
        """Write the current totals as an event."""
        self._rows.append(tuple(self._now))
        self._phases.append(PHASES.index(self.phase))

    def timeline(self, on_host: Sequence[MemoryKind] = (), host_activations: int = 0) -> Timeline:
        """Return the timeline of all events so far."""
        rows, phases = np.array(self._rows, np.int64), np.array(self._phases, np.int8)
        return Timeline(rows, phases, tuple(on_host), host_activations)
