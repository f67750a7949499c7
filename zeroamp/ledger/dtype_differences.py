"""Compares the dtypes that the ledger expects with those that `Ledger.verify` observed."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.hooks.observers.observed_dtypes import NO_TENSOR
from zeroamp.ledger.rows import DTYPE_COLUMNS, Row, dtype_names
from zeroamp.planning.group_dtypes import PER_OP, ParamDtypes, group_dtypes
from zeroamp.planning.groups import GroupPlan, ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import describe
from zeroamp.policies.numbers import counted

REPLICAS = "replicas"
"""The boundary of the all-reduce of shards over replicas (HSDP), which has no column in the ledger."""

_REMEDIES = {
    "stored": "Do not cast a wrapped model: cast before wrap_model, or not at all.",
    "param": "Leave FSDP2's mixed-precision policy of the unit as wrap_model set it.",
    "compute": "The module casts by itself: remove the cast, or name the module in data_types.keep_in_fp32_modules.",
    "gradient": "Remove the hook that casts the gradient.",
    "communication": "Leave the reduce-scatter of the unit as wrap_model set it.",
    "accumulate": "Leave the accumulation as wrap_model set it; data_types.grad_accum_dtype sets another dtype.",
    "optimizer": "Keep optimizer state in the expected dtype. For bf16 state, set data_types.optimizer_states_dtype.",
    REPLICAS: "Leave the reduce-scatter of the unit, whose output replicas average, as wrap_model set it.",
}

Seen = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Parameter -> boundary -> dtype -> the op, collective or tensor that had this dtype first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A parameter that had another dtype at a boundary than the ledger expects."""

    parameter: str
    owner: str
    """Class and FQN of the module that owns the parameter."""
    boundary: str
    """A column of the ledger, or `REPLICAS`."""
    expected: str | None
    observed: str
    where: str
    """The op, collective or tensor that had the observed dtype."""

    def __str__(self) -> str:
        """Return a sentence with the boundary, the expected and the observed dtype, and what to do."""
        return describe(
            f"{self.parameter} of {self.owner}: {self.boundary}",
            f"{self.observed} ({self.where})",
            self.expected or "none, because it is frozen",
            _REMEDIES[self.boundary],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Dtypes and traffic that `Ledger.verify` observed on this rank. On all ranks, all dtypes were as expected."""

    plan: Plan
    ranks: Ranks
    observed: Seen
    """Parameter -> boundary -> dtype -> the op, collective or tensor that had this dtype first."""
    num_micro_batches: int
    counted: Traffic
    """Calls and bytes of the collectives of the observed step."""

    @property
    def planned(self) -> Traffic:
        """Calls and bytes of collectives that the ledger expects in the optimizer step."""
        from zeroamp.dry_run.planned_traffic import plan_traffic

        return plan_traffic(self.plan, self.ranks)

    @property
    def is_traffic_as_planned(self) -> bool:
        """Whether calls and bytes are as planned. They are if modules run in the order in which they are registered."""
        names = {group.name for group in self.plan.groups}
        return _of_groups(self.planned, names) == _of_groups(self.counted, names)

    def __str__(self) -> str:
        """Return a table of two rows per group: the expected and the observed dtypes."""
        from zeroamp.reporting.ledger_tables import verification_text

        return verification_text(self)

    def __repr__(self) -> str:
        """Return the result in one line."""
        return f"Verification({self.title()}; {self.traffic_result()})"

    def title(self) -> str:
        """Return what was compared: the numbers of parameters and micro-batches."""
        total = sum(len(group.params) for group in self.plan.all_groups)
        seen = "every dtype is the expected one"
        if not any(boundaries.get("optimizer") for boundaries in self.observed.values()):
            seen += "; optimizer state was not observed (pass optimizer=)"
        micro_batches = counted(self.num_micro_batches, "micro-batch", "micro-batches")
        return f"{counted(total, 'parameter')}, {micro_batches}: {seen}"

    def traffic_result(self) -> str:
        """Return whether the collectives were the planned ones, in words."""
        result = "as planned" if self.is_traffic_as_planned else "not as planned: modules run in another order"
        return f"collectives and their bytes are {result}"

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can hold: micro-batches, whether traffic was as planned, groups, parameters.

        Each group and parameter has, by boundary, the expected dtype ("expected") and a list of those "observed".
        """
        return {
            "num_micro_batches": self.num_micro_batches,
            "is_traffic_as_planned": self.is_traffic_as_planned,
            "groups": self._group_dicts(),
            "parameters": [
                {
                    "parameter": param.fqn,
                    "group": group.name,
                    "expected": expected_dtypes(param.dtypes, group, self.plan, self.ranks),
                    "observed": self._observed((param,)),
                }
                for group in self.plan.all_groups
                for param in group.params
            ],
        }

    def _group_dicts(self) -> list[Row]:
        return [
            {
                "group": group.name,
                "expected": {
                    **expected_dtypes(group.dtypes, group, self.plan, self.ranks),
                    "param": ", ".join(sorted({short_name(param.dtypes.param) for param in group.params})),
                },
                "observed": self._observed(group.params),
            }
            for group in self.plan.all_groups
        ]

    def _observed(self, params: tuple[ParamPlan, ...]) -> dict[str, list[str]]:
        return {
            boundary: sorted({name for param in params for name in self.observed[param.fqn].get(boundary, {})})
            for boundary in (*DTYPE_COLUMNS, REPLICAS)
        }


def expected_dtypes(dtypes: ParamDtypes, group: GroupPlan, plan: Plan, ranks: Ranks) -> dict[str, str | None]:
    """Return the dtype that is expected at each boundary, or None where nothing should be observed.

    A parameter that is not stored in fp32 is frozen (quantized, for example). Its module may cast it to any dtype.
    torchao's `Float8Linear` may too: on a CPU it emulates float8 in fp32.
    """
    on_ranks = group_dtypes(group.key, plan.policy, ranks)
    is_trained_and_sharded = dtypes.communication is not None and on_ranks.reduction is not None
    replica = on_ranks.replica if is_trained_and_sharded else None
    names = {**dtype_names(on_ranks.on_these_ranks(dtypes)), REPLICAS: None if replica is None else short_name(replica)}
    casts_freely = dtypes.stored != torch.float32 or dtypes.compute == short_name(dtypes.param) != names["gradient"]
    return {**names, "compute": PER_OP} if casts_freely else names


def find_differences(plan: Plan, ranks: Ranks, observed: Seen) -> list[Difference]:
    """Return every parameter and boundary at which another dtype than the expected one was observed."""
    return [
        Difference(
            parameter=param.fqn,
            owner=f"{param.owner_classes[0]} ({param.owner_fqns[0] or 'the root'})",
            boundary=boundary,
            expected=expected,
            observed=name,
            where=where,
        )
        for group in plan.all_groups
        for param in group.params
        for boundary, expected in expected_dtypes(param.dtypes, group, plan, ranks).items()
        for name, where in observed[param.fqn].get(boundary, {}).items()
        if expected not in (name, PER_OP) and name != NO_TENSOR
    ]


def see_collectives(traffic: Traffic, plan: Plan, observed: dict[str, dict[str, dict[str, str]]]) -> None:
    """Add the dtypes of each group's collectives to `observed`, for all parameters of the group.

    Gradients are communicated by the reduction over shards; if there is none, by the all-reduce over replicas.
    An all-gather of bytes shows no dtype of a parameter: the unsharded parameters do.
    """
    calls: dict[str, dict[str, str]] = {}
    for key in traffic.calls:
        calls.setdefault(key.group, {})[key.collective] = short_name(key.dtype)
    for group in plan.all_groups:
        of_group = calls.get(group.name, {})
        is_scattered = bool({"reduce_scatter", "all_to_all"} & of_group.keys())
        for collective, name in of_group.items():
            if name == short_name(group.all_gather_dtype) == "uint8" and collective == "all_gather":
                continue
            boundary = "param" if collective == "all_gather" else "communication"
            if collective == "all_reduce" and is_scattered:
                boundary = REPLICAS
            for param in group.params:
                if boundary == "param" or param.is_trainable:
                    observed[param.fqn].setdefault(boundary, {}).setdefault(name, f"{collective} of {group.name}")


def _of_groups(traffic: Traffic, names: Container[str]) -> dict[Any, tuple[int, int]]:
    """Return calls and bytes of the parameter groups. An observed step issues other collectives in each micro-batch."""
    groups = ((key, calls) for key, calls in traffic.calls.items() if key.group in names)
    return {key: (calls, traffic.num_bytes[key]) for key, calls in groups}
