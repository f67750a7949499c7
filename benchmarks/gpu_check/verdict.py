"""The result of a part of the check: a verdict, its reason, and all measured values."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import torch

Verdict = Literal["ok", "FAILED", "not measured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The device that a part runs on, and whether it runs at small size."""

    device: torch.device
    small: bool = False
    """Small sizes, for a CPU and for tests: a part takes seconds instead of minutes."""

    @property
    def on_cuda(self) -> bool:
        """Whether there are streams, kernels and an allocator to check."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of one part."""

    verdict: Verdict
    reason: str
    """One line: measured numbers, or the failures, or why nothing was measured."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Title -> rows, for the record."""
    values: dict[str, Any] = field(default_factory=dict)
    """Everything else, as JSON holds it."""

    @classmethod
    def of(
        cls,
        failures: list[str],
        summary: str,
        *,
        not_measured: str = "",
        tables: dict[str, list[dict[str, Any]]] | None = None,
        values: dict[str, Any] | None = None,
    ) -> Self:
        """Return FAILED with the first failures, or ok with the summary and with what this device cannot measure."""
        if failures:
            more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
            reason = "; ".join(failures[:3]) + more
        else:
            reason = summary + (f"; not measured: {not_measured}" if not_measured else "")
        return cls(
            verdict="FAILED" if failures else "ok",
            reason=reason,
            tables=tables or {},
            values={**(values or {}), "failures": failures},
        )

    def as_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        return f"{name}: {self.verdict} - {' '.join(self.reason.split())}"
