"""One dtype ledger of all parts of a pipeline, also of those that other ranks have."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from zeroamp.ledger.rows import PART, LedgerRows, Row, ledger_rows
from zeroamp.planning.mesh import Ranks, is_first_rank
from zeroamp.planning.mesh_axes import ranks_of_axes
from zeroamp.planning.plan import Plan
from zeroamp.rank_group import RankGroup
from zeroamp.wrapping.state import WrapState, models_of, wrap_state


def explain(state: WrapState) -> tuple[Plan, Ranks, LedgerRows]:
    """Return what the ledger of the parts of all ranks has, in the order of the stages' ranks. All ranks call this.

    Errors of the exchange name this function, so it has the name of the user's call.

    `state`: of `PipelineStep.model`. Without an axis "pp" these are the parts of this rank. The `Ranks` are those of
    the first part.
    """
    stages = state.axes.stages
    place = 0 if stages is None else stages.get_local_rank()

    def of_rank() -> list[tuple[Plan, Ranks, LedgerRows]]:
        states = [wrap_state(part) for part in models_of(state)]
        if not is_first_rank(states[0].axes.whole):  # the ranks of one stage have the same parts
            return []
        found = []
        for index, each in enumerate(states):
            ranks = ranks_of_axes(each.axes)
            part = f"{place}.{index}" if len(states) > 1 else str(place)
            # Without extensions, which are of this process.
            found.append((replace(each.plan, extensions=()), ranks, _named(ledger_rows(each.plan, ranks), part)))
        return found

    of_ranks = RankGroup.shared(state.axes.whole, "signals").run(of_rank)
    plans, ranks, rows = zip(*chain.from_iterable(of_ranks), strict=True)
    plan = replace(
        plans[0],
        units=tuple(unit for each in plans for unit in each.units),
        groups=tuple(group for each in plans for group in each.groups),
        ignored=tuple(group for each in plans for group in each.ignored),
    )
    joined = LedgerRows(
        summary=_added(row for each in rows for row in each.summary),
        classes=_added(row for each in rows for row in each.classes),
        groups=[row for each in rows for row in each.groups],
        parameters=[row for each in rows for row in each.parameters],
        traffic=[row for each in rows for row in each.traffic],
    )
    return plan, ranks[0], joined


def _named(rows: LedgerRows, part: str) -> LedgerRows:
    """Return rows that begin with the name of the part."""
    tables = {"groups": rows.groups, "parameters": rows.parameters, "traffic": rows.traffic}
    return replace(rows, **{name: [{PART: part, **row} for row in table] for name, table in tables.items()})


def _added(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, those with equal dtypes and classes as one with the sums of their numbers."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        kind = tuple(value for value in row.values() if not isinstance(value, int))
        before = found.get(kind, {})
        found[kind] = {
            key: value + before.get(key, 0) if isinstance(value, int) else value for key, value in row.items()
        }
    return list(found.values())
