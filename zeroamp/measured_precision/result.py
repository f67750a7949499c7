"""`Sensitivity`: what `sensitivity` measured, as rows, as a table and as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zeroamp.reporting.tables import headed, in_one_unit, paragraph

_COLUMNS = {
    "loss_change": "loss",
    "gradient_change": "gradient",
    "own_gradient_change": "own gradient",
    "gradient_change_of_others": "others",
    "overflow": "overflow",
    "underflow": "underflow",
}
"""Key of a row -> header of the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """What low precision of groups of modules changes, on some batches, at one moment of a training.

    A change is relative to the run with all modules in fp32: of a gradient, the norm of the difference over the norm.
    """

    rows: tuple[Mapping[str, Any], ...]
    """One mapping per group, that with the largest `gradient_change` first. With the group alone in low precision:
    `loss_change`, `gradient_change` and `own_gradient_change`, of the gradient of the group's own parameters. With all
    but the group in low precision: `gradient_change_of_others`. Also `group`, `modules` (FQNs), `bytes_saved` in one
    all-gather of the group, `flops_saved` per rank in a forward and backward of all batches; in fp16 the shares of
    elements of the gradient that `overflow` at the loss scale, and that become 0 (`underflow`)."""
    low: str
    """The low precision of the config: "bf16" or "fp16"."""
    noise: float
    """Half of the norm of the difference between the gradients of two halves of the batches, over the norm of the
    whole: about how far the gradient of these batches is from that of all data."""
    config_change: float
    """Of the gradient, as the config computes, all-gathers and sends it."""
    low_change: float
    """Of the gradient, with all groups in low precision."""
    recommended: Mapping[str, Any]
    """What to merge into the config. Empty if nothing is needed, or nothing helps."""
    recommended_change: float | None
    """Of the gradient, in a run with the dtypes of `recommended`. None if that is empty."""
    advice: str
    """The reason for the recommendation, in a sentence."""
    choices: tuple[Mapping[str, Any], ...]
    """One mapping per measured choice of groups in fp32, all others in low precision: `in_fp32` (names of groups),
    `bytes` that they add to one all-gather, and `gradient_change`."""
    parameter_changes: Mapping[str, float]
    """FQN -> change of the parameter's own gradient, with all groups in low precision."""

    def __str__(self) -> str:
        """Return a table of the groups, and the recommendation."""
        cells = [
            {
                "group": row["group"],
                "modules": len(row["modules"]),
                **{header: f"{row[key]:.2g}" for key, header in _COLUMNS.items() if key in row},
                "bytes saved": row["bytes_saved"],
                "GFLOPs": row["flops_saved"] / 1e9,
            }
            for row in self.rows
        ]
        block = [json.dumps(self.recommended)] if self.recommended else []
        return "\n".join(
            [headed(self.title(), in_one_unit(cells, ["bytes saved"])), "", paragraph(self.advice), *block]
        )

    def title(self) -> str:
        """Return the sentences above the table: what the changes are, the noise, and the changes of the whole."""
        return (
            f"Changes against fp32 if each group alone is in {self.low}, and ('others') if all groups but this one "
            f"are. Noise of the gradient {self.noise:.2g}; change with all groups in {self.low} {self.low_change:.2g}, "
            f"as the config has it {self.config_change:.2g}."
        )

    def to_json(self) -> str:
        """Return all values as JSON. A number that is not finite is null."""
        values = json.loads(json.dumps(asdict(self)), parse_constant=lambda _name: None)  # strict JSON has no NaN
        return json.dumps(values, indent=2, allow_nan=False)
