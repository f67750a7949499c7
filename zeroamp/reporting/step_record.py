"""`StepRecord`: the numbers of one optimizer step, as values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

PARTS = ("forward", "backward", "exposed_communication", "optimizer", "other")
"""Parts that add up to `step_s`. Each is the attribute `<part>_s`."""
Count = Annotated[int, Field(lt=2**63)]
"""A whole number of a file that a float can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The numbers of one optimizer step, taken or skipped, as values on the host.

    Equal on all ranks: step, loss, grad_norm, loss_scale, skipped, num_skipped, lr. Times, rates, counted tokens,
    memory and traffic are those of the rank that made the record. Files hold those of the first rank.

    `step_s` begins at the end of the step before, so it includes what ran in between: loading data, evaluating, saving.
    That of the first step begins at the first forward. The four parts, `forward_s` to `optimizer_s`, do not overlap;
    `other_s` is the rest.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    step: Count
    loss: float
    """Mean over all micro-batches and ranks: see `StepReport.loss_tensor`."""
    grad_norm: float
    """Norm of all gradients before clipping, without the loss scale."""
    loss_scale: float
    skipped: bool
    num_skipped: Count = 0
    """Skipped steps of the run so far, this one included."""
    lr: tuple[float, ...]
    """Learning rate of each param group."""

    step_s: float
    forward_s: float
    """Forwards with gradients enabled, without exposed communication."""
    backward_s: float
    """Backwards, without exposed communication."""
    exposed_communication_s: float
    """Waits during the other three parts, see [Note: Exposed communication] in step_clock.py."""
    optimizer_s: float
    """Norm with the step's all-reduce, clipping, update, scheduler; without exposed communication."""

    num_tokens: Count | None = None
    """Tokens of the step on all ranks: as given to `RunReport`, else the elements of `input_ids` (or of the first 2-D
    integer tensor), with padding, on this rank, times the ranks. None: unknown."""
    tokens_per_s: float | None = None
    """num_tokens / step_s."""
    traffic_bytes: Mapping[str, Count] = field(default_factory=dict)
    """"collective dtype" -> bytes of unsharded tensors, as `zeroamp.traffic` counts them."""
    peak_active_gib: float | None = None
    """Active memory of the caching allocator, since its peak was last reset. None on the CPU."""
    peak_reserved_gib: float | None = None
    num_alloc_retries: Count | None = None
    """Flushes of the allocator's cache since the process began."""
    peak_rss_gib: float = 0.0
    """Resident host memory of the process since it began."""

    @property
    def other_s(self) -> float:
        """Seconds outside of the four parts: loading data, evaluating, saving, Python in between."""
        return self.step_s - (self.forward_s + self.backward_s + self.exposed_communication_s + self.optimizer_s)

    @property
    def communicated_bytes(self) -> int:
        """Sum of `traffic_bytes`."""
        return sum(self.traffic_bytes.values())

    def to_json(self) -> dict[str, Any]:
        """Return a dict for strict JSON: inf and nan are strings."""
        return {"kind": "step", **json.loads(_ADAPTER.dump_json(self))}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StepRecord":
        """Return the record that `to_json` wrote. Unknown fields are ignored.

        Raises:
            ValueError: a field is missing, or has a value of another type.
        """
        return _ADAPTER.validate_python(values)


_ADAPTER = TypeAdapter(StepRecord)
