"""The rows of the dtype ledger, as JSON holds them: one dict per parameter, group, class and pair of dtypes.

Bytes per step are those of `zeroamp.planning.traffic`, per rank those of its `Memory`. What cannot be known is None.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from zeroamp.planning.groups import GroupPlan, ParamDtypes, ParamPlan
from zeroamp.planning.plan import Plan
from zeroamp.planning.replay import step_schedule
from zeroamp.planning.traffic import Ranks, dtypes_on, group_collectives, param_memory, plan_traffic, wire_on
from zeroamp.policies.dtypes import short_name

DTYPE_COLUMNS = tuple(column.name for column in fields(ParamDtypes))
PER_STEP = ("gathered_bytes_per_step", "reduced_bytes_per_step")
PER_RANK = ("storage_bytes_per_rank", "gathered_bytes_per_rank", "gradient_bytes_per_rank")

Row = dict[str, Any]
Costs = dict[str, dict[str, int | None]]
"""Parameter -> column of bytes -> bytes."""
Dtypes = dict[str, ParamDtypes]
"""Parameter -> its dtypes on the ranks at hand."""


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """All rows of one plan on the given ranks."""

    summary: list[Row]
    """Per pair of gather and wire dtype."""
    classes: list[Row]
    """Per classes of the owning modules and seven dtypes."""
    groups: list[Row]
    parameters: list[Row]
    traffic: list[Row]
    """Calls and bytes per (collective, dtype, group), as `zeroamp.traffic(model)` counts them in one step."""


def ledger_rows(plan: Plan, ranks: Ranks) -> LedgerRows:
    """Return the rows of `plan`."""
    costs = _costs(plan, ranks)
    dtypes = {p.fqn: dtypes_on(p.dtypes, group, plan.policy, ranks) for group in plan.groups for p in group.params}
    traffic = plan_traffic(plan, ranks)
    return LedgerRows(
        summary=_summary(plan, ranks, costs),
        classes=_classes(plan, dtypes, costs),
        groups=[_group_row(group, dtypes_on(group.dtypes, group, plan.policy, ranks), costs) for group in plan.groups],
        parameters=[_param_row(param, group, dtypes, costs) for group in plan.groups for param in group.params],
        traffic=[
            {**_names(key._asdict()), "calls": calls, "bytes": traffic.num_bytes[key]}
            for key, calls in traffic.calls.items()
        ],
    )


def _costs(plan: Plan, ranks: Ranks) -> Costs:
    """Return the five columns of bytes of every parameter, by FQN."""
    schedule, num_shards = step_schedule(plan), ranks.shards(plan.policy)
    costs: Costs = {}
    for group in plan.groups:
        calls = list(group_collectives(group, plan.policy, ranks, schedule))
        for param in group.params:
            memory = None if num_shards is None else param_memory(param, plan.policy, num_shards)
            held = (None, None, None) if memory is None else (memory.storage, memory.gathered, memory.gradient)
            costs[param.fqn] = {
                PER_STEP[0]: sum(call.num_bytes(param, num_shards) for call in calls if not call.is_of_gradients),
                PER_STEP[1]: sum(call.num_bytes(param, num_shards) for call in calls if call.is_of_gradients),
                **dict(zip(PER_RANK, held, strict=True)),
            }
    return costs


def _totals(params: Iterable[ParamPlan], costs: Costs) -> Row:
    rows = [costs[param.fqn] for param in params]
    known = [[row[column] for row in rows] for column in (*PER_STEP, *PER_RANK)]
    sums = [None if None in values else sum(value or 0 for value in values) for values in known]
    return dict(zip((*PER_STEP, *PER_RANK), sums, strict=True))


def _summary(plan: Plan, ranks: Ranks, costs: Costs) -> list[Row]:
    pairs: dict[tuple[str, str], list[ParamPlan]] = {}
    for group in plan.groups:
        wire = wire_on(group, plan.policy, ranks)
        pairs.setdefault((short_name(group.gather), short_name(wire)), []).extend(group.params)
    return [
        {
            "gather": gather,
            "wire": wire,
            "params": len(params),
            "elements": sum(param.numel for param in params),
            "bytes_per_gather": sum(param.numel * param.group_key[1].itemsize for param in params),
            **_totals(params, costs),
        }
        for (gather, wire), params in sorted(pairs.items())
    ]


def _classes(plan: Plan, dtypes: Dtypes, costs: Costs) -> list[Row]:
    kinds: dict[tuple[tuple[str, ...], ParamDtypes], list[ParamPlan]] = {}
    for param in plan.params:
        kinds.setdefault((param.owner_classes, dtypes[param.fqn]), []).append(param)
    return [
        {
            "class": ", ".join(classes),
            "params": len(params),
            "elements": sum(param.numel for param in params),
            **dtype_names(shared),
            **_totals(params, costs),
        }
        for (classes, shared), params in kinds.items()
    ]


def _group_row(group: GroupPlan, dtypes: ParamDtypes, costs: Costs) -> Row:
    return {
        "group": group.name,
        "kind": group.kind,
        "unit": group.unit or "root",
        "params": len(group.params),
        "elements": group.numel,
        **dtype_names(dtypes),
        **_totals(group.params, costs),
    }


def _param_row(param: ParamPlan, group: GroupPlan, dtypes: Dtypes, costs: Costs) -> Row:
    return {
        "parameter": param.fqn,
        "aliases": list(param.aliases),
        "unit": param.unit or "root",
        "group": group.name,
        "class": ", ".join(param.owner_classes),
        "shape": list(param.shape),
        "elements": param.numel,
        **dtype_names(dtypes[param.fqn]),
        **costs[param.fqn],
        "why": param.reason,
    }


def dtype_names(dtypes: ParamDtypes) -> dict[str, str | None]:
    """Return the seven dtypes by their short names; None where a frozen parameter has none."""
    return _names({column: getattr(dtypes, column) for column in DTYPE_COLUMNS})


def _names(cells: dict[str, Any]) -> Row:
    return {key: short_name(cell) if isinstance(cell, torch.dtype) else cell for key, cell in cells.items()}
