"""`StepRecord`: the numbers of one optimizer step, as values."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

GIB = 1024**3

PARTS = ("forward", "backward", "exposed_communication", "optimizer", "other")
"""What `step_s` is made of: each is the field `<part>_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step, skipped ones included. Nothing is left on the device.

    The same on all ranks: step, loss, grad_norm, loss_scale, skipped, num_skipped, is_scale_exhausted, lr,
    num_tokens. Of the rank that made the record (the first one's are written): times, and all that is made of them,
    memory, traffic.

    step_s begins where the step before ended, so what ran between (loading data, evaluating, saving) is in it. Of the
    first step it begins at the first forward. The four parts, forward_s to optimizer_s,
    do not overlap; `other_s` is the rest.
    """

    step: int
    loss: float
    """Mean over all micro-batches and ranks."""
    grad_norm: float
    """Before clipping, unscaled."""
    loss_scale: float
    skipped: bool
    num_skipped: int | None = None
    """Of the run so far, this one included where it was. None: of a file that does not say."""
    is_scale_exhausted: bool = False
    """Whether overflows have left nothing of a dynamic loss scale to lower: one in the next step ends the run."""
    lr: tuple[float, ...]
    """Of each of the optimizer's groups."""

    step_s: float
    forward_s: float
    """Forwards of the model with gradients, without exposed communication."""
    backward_s: float
    """Without exposed communication."""
    exposed_communication_s: float
    """Inside the other three, see [Note: Exposed communication] in hooks/observers/communication.py."""
    optimizer_s: float
    """Norm and its sum over ranks (24 bytes), clipping, update, schedule; without exposed communication."""

    num_tokens: int | None = None
    """Of all ranks. None: not known."""
    tokens_per_s: float | None = None
    """num_tokens / step_s."""
    flops_per_s_per_rank: float | None = None
    """Model FLOPs of the step / (step_s x ranks). None: nobody counted."""
    mfu: float | None = None
    """flops_per_s_per_rank / peak FLOP/s of one device; None where either is not known."""

    traffic_bytes: Mapping[str, int] = field(default_factory=dict)
    """"collective dtype" -> bytes of unsharded tensors, as `zeroamp.traffic` counts them."""
    peak_active_gib: float | None = None
    """Of the caching allocator, since it was last reset. None on the CPU."""
    peak_reserved_gib: float | None = None
    num_alloc_retries: int | None = None
    """Flushes of the allocator's cache since the process began."""
    peak_rss_gib: float = 0.0
    """Resident host memory of the process since it began."""

    @property
    def other_s(self) -> float:
        """What is none of the four parts: loading data, evaluating, saving, Python between them."""
        return self.step_s - (self.forward_s + self.backward_s + self.exposed_communication_s + self.optimizer_s)

    @property
    def busy_s(self) -> float:
        """What this rank took where it did not wait for others."""
        return self.step_s - self.exposed_communication_s

    def scalars(self) -> dict[str, float]:
        """Return what a monitor plots: every number that is known, by its name; rates as lr, or lr/0, lr/1, …."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("step", "lr", "traffic_bytes")}
        rates = {"lr": self.lr[0]} if len(self.lr) == 1 else {f"lr/{index}": lr for index, lr in enumerate(self.lr)}
        traffic = {f"traffic_bytes/{key.replace(' ', '_')}": value for key, value in self.traffic_bytes.items()}
        known = {name: float(value) for name, value in values.items() if value is not None}
        return known | rates | {name: float(value) for name, value in traffic.items()}

    def to_json(self) -> dict[str, Any]:
        """Return what strict JSON can hold: inf and nan as text."""
        return {"kind": "step", **{name: _to_json(value) for name, value in asdict(self).items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StepRecord":
        """Return the record that `to_json` was called on. Fields that a newer version wrote are left out.

        Raises:
            TypeError: a field is missing, or holds what is none of its kind.
            ValueError: one holds text that is no number.
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
    # JSON has integers of any length, which are no floats.
    return isinstance(value, kind) and (isinstance(value, float) or abs(value) < 2**63)


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value
