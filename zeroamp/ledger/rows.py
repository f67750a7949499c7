"""The rows of the dtype ledger, as JSON holds them: one dict per parameter, group, class and pair of dtypes.

Bytes per step come from `zeroamp/dry_run/planned_traffic.py`, bytes per rank from `planning/shard_sizes.py`. Unknown
values are None.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from zeroamp.planning.group_dtypes import GroupDtypes, ParamDtypes, group_dtypes
from zeroamp.planning.groups import GroupPlan, ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import param_memory
from zeroamp.policies.dtypes import short_name

DTYPE_COLUMNS = tuple(column.name for column in fields(ParamDtypes))
PER_STEP = ("all_gathered_bytes_per_step", "reduced_bytes_per_step")
PER_RANK = ("stored_bytes_per_rank", "unsharded_bytes_per_rank", "gradient_bytes_per_rank")
BYTES = (*PER_STEP, *PER_RANK)

SHARD_DIMS = "shard_dims"
"""Key of group rows: the dimensions that are sharded, each once; [] where they are not known, or nothing is sharded."""
SHARD_DIM = "shard_dim"
"""Key of parameter rows: the dimension that is sharded, or None."""
PART = "part"
"""Key of the rows of a pipeline: the rank on the axis "pp" that has the part, then its number if there are several."""

Row = dict[str, Any]
Costs = dict[str, dict[str, int | None]]
"""Parameter -> column of bytes -> bytes."""
OnRanks = dict[str, GroupDtypes]
"""Group -> its dtypes on the given ranks."""


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """All rows of one plan on the given ranks."""

    summary: list[Row]
    """One row per pair of all-gather and reduction dtype."""
    classes: list[Row]
    """One row per combination of owning module classes and the seven dtypes."""
    groups: list[Row]
    parameters: list[Row]
    traffic: list[Row]
    """One row per (collective, dtype, group): calls and bytes as `zeroamp.traffic(model)` counts them in one step."""

    @property
    def has_other_dims(self) -> bool:
        """Whether any parameter is sharded over another dimension than 0."""
        return any(row[SHARD_DIM] for row in self.parameters)

    @property
    def part_columns(self) -> tuple[str, ...]:
        """The column of the part of a pipeline, if the rows are of one."""
        return (PART,) if any(PART in row for row in self.groups) else ()


def ledger_rows(plan: Plan, ranks: Ranks) -> LedgerRows:
    """Return all rows of `plan` on `ranks`. Bytes are None if they depend on a number of ranks that is not known."""
    from zeroamp.dry_run.planned_traffic import plan_traffic

    costs = _costs(plan, ranks)
    ranks_of_group = {group.name: ranks.of(is_expert=group.is_expert) for group in plan.all_groups}
    shards = {name: of_group.shards(plan.policy) for name, of_group in ranks_of_group.items()}
    on_ranks = {
        group.name: group_dtypes(group.key, plan.policy, ranks_of_group[group.name]) for group in plan.all_groups
    }
    traffic = plan_traffic(plan, ranks)
    return LedgerRows(
        summary=_summary(plan, on_ranks, costs),
        classes=_classes(plan, on_ranks, costs),
        groups=[_group_row(group, on_ranks, costs, shards[group.name]) for group in plan.all_groups],
        parameters=[
            _param_row(param, group, on_ranks, costs, shards[group.name])
            for group in plan.all_groups
            for param in group.params
        ],
        traffic=[
            {
                "collective": key.collective,
                "dtype": short_name(key.dtype),
                "group": key.group,
                "calls": calls,
                "bytes": traffic.num_bytes[key],
            }
            for key, calls in traffic.calls.items()
        ],
    )


def _costs(plan: Plan, ranks: Ranks) -> Costs:
    """Return the five columns of bytes of every parameter, by FQN."""
    from zeroamp.dry_run.planned_traffic import bytes_per_step

    moved = bytes_per_step(plan, ranks)
    costs: Costs = {}
    for group in plan.all_groups:
        num_shards = ranks.of(is_expert=group.is_expert).shards(plan.policy)
        for param in group.params:
            memory = None if num_shards is None else param_memory(param, plan.policy, num_shards)
            held = (None, None, None) if memory is None else (memory.stored, memory.unsharded, memory.gradient)
            costs[param.fqn] = dict(zip(BYTES, (*moved[param.fqn], *held), strict=True))
    return costs


def _totals(params: Iterable[ParamPlan], costs: Costs) -> Row:
    rows = [costs[param.fqn] for param in params]
    known = [[row[column] for row in rows] for column in BYTES]
    sums = [None if None in values else sum(value or 0 for value in values) for values in known]
    return dict(zip(BYTES, sums, strict=True))


def _summary(plan: Plan, on_ranks: OnRanks, costs: Costs) -> list[Row]:
    pairs: dict[tuple[str, str], list[ParamPlan]] = {}
    for group in (group for group in plan.all_groups if group.kind != "ignored"):  # ignored: not communicated
        communication = short_name(on_ranks[group.name].between_ranks)
        for param in group.params:
            pairs.setdefault((short_name(param.dtypes.param), communication), []).append(param)
    return [
        {
            "param": param_dtype,
            "communication": communication,
            "params": len(params),
            "elements": sum(p.numel for p in params),
            "bytes_per_all_gather": sum(p.numel * p.dtypes.param.itemsize for p in params),
            **_totals(params, costs),
        }
        for (param_dtype, communication), params in sorted(pairs.items())
    ]


def _classes(plan: Plan, on_ranks: OnRanks, costs: Costs) -> list[Row]:
    kinds: dict[tuple[tuple[str, ...], ParamDtypes], list[ParamPlan]] = {}
    for group in plan.all_groups:
        for param in group.params:
            dtypes = on_ranks[group.name].on_these_ranks(param.dtypes)
            kinds.setdefault((param.owner_classes, dtypes), []).append(param)
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


def _group_row(group: GroupPlan, on_ranks: OnRanks, costs: Costs, num_shards: int | None) -> Row:
    dims = {_shard_dim(param, num_shards) for param in group.params}
    return {
        "group": group.name,
        "kind": group.kind,
        "unit": group.unit or "root",
        "params": len(group.params),
        "elements": group.numel,
        SHARD_DIMS: sorted(dim for dim in dims if dim is not None),
        **dtype_names(on_ranks[group.name].on_these_ranks(group.dtypes)),
        "param": ", ".join(sorted({short_name(param.dtypes.param) for param in group.params})),
        **_totals(group.params, costs),
    }


def _shard_dim(param: ParamPlan, num_shards: int | None) -> int | None:
    return None if num_shards is None or param.group_key.is_replicated else param.shard_dim(num_shards)


def _param_row(param: ParamPlan, group: GroupPlan, on_ranks: OnRanks, costs: Costs, num_shards: int | None) -> Row:
    return {
        "parameter": param.fqn,
        "aliases": list(param.aliases),
        "unit": param.unit or "root",
        "group": group.name,
        "class": ", ".join(param.owner_classes),
        "shape": list(param.shape),
        SHARD_DIM: _shard_dim(param, num_shards),
        "elements": param.numel,
        **dtype_names(on_ranks[group.name].on_these_ranks(param.dtypes)),
        **costs[param.fqn],
        "why": param.reason,
    }


def dtype_names(dtypes: ParamDtypes) -> dict[str, str | None]:
    """Return the seven dtypes by their short names; None where a frozen parameter has none."""
    cells = {column: getattr(dtypes, column) for column in DTYPE_COLUMNS}
    return {column: short_name(cell) if isinstance(cell, torch.dtype) else cell for column, cell in cells.items()}


def cells(row: Row, columns: Sequence[str]) -> Row:
    """Return the row's columns, with "-" for None."""
    return {column: "-" if row[column] is None else row[column] for column in columns}
