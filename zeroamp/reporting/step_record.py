"""`StepRecord`: the numbers of one optimizer step, as values."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

GIB = 1024**3

PARTS = ("forward", "backward", "exposed_communication", "optimizer", "other")
"""Parts that add up to `step_s`. Each is the attribute `<part>_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The numbers of one optimizer step, taken or skipped, as values on the host.

    Equal on all ranks: step, loss, grad_norm, loss_scale, skipped, num_skipped, is_scale_exhausted, lr. Times, rates,
    counted tokens, memory and traffic are those of the rank that made the record. Files hold those of the first rank.

    `step_s` begins at the end of the step before, so it includes what ran in between: loading data, evaluating, saving.
    That of the first step begins at the first forward. The four parts, `forward_s` to `optimizer_s`, do not overlap;
    `other_s` is the rest.
    """

    step: int
    loss: float
    """Mean over all micro-batches and ranks: see `StepReport.loss_tensor`."""
    grad_norm: float
    """Norm of all gradients before clipping, without the loss scale."""
    loss_scale: float
    skipped: bool
    num_skipped: int | None = None
    """Skipped steps of the run so far, this one included. None: a file of an older version."""
    is_scale_exhausted: bool = False
    """Whether the dynamic loss scale and its hysteresis are at their minimum: an overflow in the next step is an error.
    """
    lr: tuple[float, ...]
    """Learning rate of each param group."""

    step_s: float
    forward_s: float
    """Forwards with gradients enabled, without exposed communication."""
    backward_s: float
    """Backwards, without exposed communication."""
    exposed_communication_s: float
    """Waits during the other three parts, see [Note: Exposed communication] in exposed_communication.py."""
    optimizer_s: float
    """Norm with the step's all-reduce, clipping, update, scheduler; without exposed communication."""

    num_tokens: int | None = None
    """Tokens of the step on all ranks: as given to `RunReport`, or those counted on this rank times the ranks.

    None: unknown."""
    tokens_per_s: float | None = None
    """num_tokens / step_s."""
    flops_per_s_per_rank: float | None = None
    """Model FLOPs of the step / (step_s x ranks). None: unknown."""
    mfu: float | None = None
    """flops_per_s_per_rank / peak FLOP/s of one device. None if either is unknown."""

    traffic_bytes: Mapping[str, int] = field(default_factory=dict)
    """"collective dtype" -> bytes of unsharded tensors, as `zeroamp.traffic` counts them."""
    peak_active_gib: float | None = None
    """Active memory of the caching allocator, since its peak was last reset. None on the CPU."""
    peak_reserved_gib: float | None = None
    num_alloc_retries: int | None = None
    """Flushes of the allocator's cache since the process began."""
    peak_rss_gib: float = 0.0
    """Resident host memory of the process since it began."""

    @property
    def other_s(self) -> float:
        """Seconds outside of the four parts: loading data, evaluating, saving, Python in between."""
        return self.step_s - (self.forward_s + self.backward_s + self.exposed_communication_s + self.optimizer_s)

    @property
    def busy_s(self) -> float:
        """Seconds in which this rank did not wait for communication."""
        return self.step_s - self.exposed_communication_s

    def scalars(self) -> dict[str, float]:
        """Return name -> number, for monitors, without unknown numbers. Learning rates are lr, or lr/0, lr/1, …"""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("step", "lr", "traffic_bytes")}
        rates = {"lr": self.lr[0]} if len(self.lr) == 1 else {f"lr/{index}": lr for index, lr in enumerate(self.lr)}
        traffic = {f"traffic_bytes/{key.replace(' ', '_')}": value for key, value in self.traffic_bytes.items()}
        known = {name: float(value) for name, value in values.items() if value is not None}
        return known | rates | {name: float(value) for name, value in traffic.items()}

    def to_json(self) -> dict[str, Any]:
        """Return a dict for strict JSON: inf and nan are strings."""
        return {"kind": "step", **{name: _to_json(value) for name, value in asdict(self).items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StepRecord":
        """Return the record that `to_json` wrote. Unknown fields, of a newer version, are ignored.

        Raises:
            TypeError: a field is missing or has the wrong type.
            ValueError: a string is not a number.
        """
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        known |= {name: float(value) for name, value in known.items() if isinstance(value, str)}
        for f in fields(cls):
            if f.name in known and not _is_of_kind(f.name, known[f.name], can_be_none=f.default is None):
                raise TypeError(f"{f.name} cannot be {known[f.name]!r}")
        return cls(**known | {"lr": tuple(float(rate) for rate in known.get("lr", ()))})


def _is_of_kind(name: str, value: Any, *, can_be_none: bool) -> bool:
    if name == "traffic_bytes":
        return isinstance(value, Mapping) and all(_is_number(each, int) for each in value.values())
    if name == "lr":
        return isinstance(value, list)
    return _is_number(value, int if name == "step" else int | float) or (value is None and can_be_none)


def _is_number(value: Any, kind: Any) -> bool:
    # JSON integers have any length. Large ones cannot become floats.
    return isinstance(value, kind) and (isinstance(value, float) or abs(value) < 2**63)


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value
