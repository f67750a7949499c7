"""What the ledger promised beside what a verification saw, as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroamp.groups import GroupPlan, ParamPlan
from zeroamp.hooks import Traffic
from zeroamp.ledger_rows import DTYPE_COLUMNS, dtype_names
from zeroamp.plan import Plan
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import describe
from zeroamp.tables import Row, fold, render
from zeroamp.traffic_plan import STEP

PER_OP = "per op"

_REMEDIES = {
    "storage": "Do not cast a wrapped model: cast before wrap_model, or not at all.",
    "gather": "Leave FSDP2's mixed-precision policy of the unit as wrap_model set it.",
    "compute": "The module casts by itself: remove the cast, or let the config ask for what the module does.",
    "gradient": "Remove the hook that casts the gradient.",
    "wire": "Leave the reduce-scatter and all-reduce of the unit as wrap_model set them.",
    "accumulate": "Leave the accumulation as wrap_model set it; data_types.grad_accum_dtype asks for another.",
    "optimizer": "Keep optimizer state in the dtype of the stored parameters.",
}

Seen = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Parameter -> boundary -> dtype -> where it was seen first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One parameter at one boundary, in another dtype than promised."""

    parameter: str
    owner: str
    """Class and FQN of the module that owns it."""
    boundary: str
    """A column of the ledger: "storage", "gather", "compute", "gradient", "wire", "accumulate" or "optimizer"."""
    promised: str | None
    observed: str
    where: str
    """The op, collective or tensor that was in it."""

    def __str__(self) -> str:
        """Return where, what was found, what was promised and what to do."""
        return describe(
            f"{self.parameter} of {self.owner}, {self.boundary}",
            f"{self.observed} ({self.where})",
            f"{self.promised or 'none, it is frozen'}, as the ledger promises",
            _REMEDIES[self.boundary],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What `Ledger.verify` saw: on this rank; the others saw nothing that differs from what was promised either."""

    plan: Plan
    observed: Seen
    """Parameter -> boundary -> dtype -> where it was seen first."""
    num_micro_batches: int
    planned: Traffic
    """What the ledger expects to be moved in the window."""
    counted: Traffic
    """What was moved."""

    @property
    def is_traffic_as_planned(self) -> bool:
        """Whether calls and bytes are the planned ones: they are where modules run as they are registered."""
        return _without_step(self.planned) == _without_step(self.counted)

    def __str__(self) -> str:
        """Return a table of two rows per group, what was promised and what was observed."""
        rows = [row for group in self.plan.groups for row in (self._row(group, "promised"), self._row(group, "seen"))]
        folded = fold(rows[::2]), fold(rows[1::2])
        if [row["group"] for row in folded[0]] == [row["group"] for row in folded[1]]:
            rows = [row for pair in zip(*folded, strict=True) for row in pair]
        total = sum(map(len, (group.params for group in self.plan.groups)))
        traffic = "those planned" if self.is_traffic_as_planned else "not those planned: modules run in another order"
        return (
            f"zeroamp: {total} parameters, {self.num_micro_batches} micro-batches: every dtype is the promised one\n"
            f"{render(rows)}\n\n"
            f'Of "{PER_OP}" no dtype is promised. "-": nothing to see, or a module that did not run.\n'
            f"Collectives and their bytes are {traffic}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: micro-batches, whether traffic was as planned, groups, parameters."""
        return {
            "num_micro_batches": self.num_micro_batches,
            "is_traffic_as_planned": self.is_traffic_as_planned,
            "groups": [
                {"group": group.name, "promised": dtype_names(group.dtypes), "observed": self._seen(group.params)}
                for group in self.plan.groups
            ],
            "parameters": [
                {
                    "parameter": param.fqn,
                    "group": group.name,
                    "promised": dtype_names(param.dtypes),
                    "observed": self._seen((param,)),
                }
                for group in self.plan.groups
                for param in group.params
            ],
        }

    def _seen(self, params: tuple[ParamPlan, ...]) -> dict[str, list[str]]:
        return {
            boundary: sorted({name for param in params for name in self.observed[param.fqn].get(boundary, {})})
            for boundary in DTYPE_COLUMNS
        }

    def _row(self, group: GroupPlan, what: str) -> Row:
        promised = {column: name or "-" for column, name in dtype_names(group.dtypes).items()}
        seen = {column: ", ".join(names) or "-" for column, names in self._seen(group.params).items()}
        return {"group": group.name, "dtypes": what, **(promised if what == "promised" else seen)}


def find_differences(plan: Plan, observed: Seen) -> list[Difference]:
    """Return every parameter and boundary at which another dtype was seen than promised."""
    differences = []
    for param in plan.params:
        promises = dtype_names(param.dtypes)
        for boundary in DTYPE_COLUMNS:
            for name, where in observed.get(param.fqn, {}).get(boundary, {}).items():
                if promises[boundary] not in (name, PER_OP):
                    owner = f"{param.owner_classes[0]} ({param.owner_fqns[0] or 'the root'})"
                    differences.append(
                        Difference(
                            parameter=param.fqn,
                            owner=owner,
                            boundary=boundary,
                            promised=promises[boundary],
                            observed=name,
                            where=where,
                        )
                    )
    return differences


def see_collectives(traffic: Traffic, plan: Plan, observed: dict[str, dict[str, dict[str, str]]]) -> None:
    """Add the dtypes that each group's collectives had to what was seen of its parameters.

    The wire is that of the reduction over the shards; where there is none (stage 0), of the all-reduce.
    """
    by_group: dict[str, list[tuple[str, str]]] = {}
    for key in traffic.calls:
        by_group.setdefault(key.group, []).append((key.collective, short_name(key.dtype)))
    for group in plan.groups:
        calls = by_group.get(group.name, [])
        is_scattered = any(collective in ("reduce_scatter", "all_to_all") for collective, _ in calls)
        for collective, name in calls:
            boundary = "gather" if collective == "all_gather" else "wire"
            if collective == "all_reduce" and is_scattered:
                continue
            for param in group.params:
                if boundary == "gather" or param.dtypes.wire is not None:
                    observed[param.fqn].setdefault(boundary, {}).setdefault(name, f"{collective} of {group.name}")


def _without_step(traffic: Traffic) -> dict[Any, tuple[int, int]]:
    return {key: (calls, traffic.num_bytes[key]) for key, calls in traffic.calls.items() if key.group != STEP}
