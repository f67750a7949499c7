"""Draws a `Ledger` and a `Verification`: their tables and notes as text.

The rows are those of `zeroamp/ledger`, which loads this module when it is printed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroamp.ledger.dtype_differences import REPLICAS, Verification
from zeroamp.ledger.rows import BYTES, DTYPE_COLUMNS, PER_RANK, PER_STEP, SHARD_DIM, SHARD_DIMS, cells
from zeroamp.planning.group_dtypes import PER_OP
from zeroamp.policies.errors import some_of
from zeroamp.reporting.tables import Row, fold, headed, in_one_unit, paragraph, render

if TYPE_CHECKING:
    from zeroamp.ledger.explain import Ledger

_STEP_NOTE = (
    "Per step: bytes of the unsharded tensors that one optimizer step moves on each rank, {padding}, as "
    "zeroamp.traffic(model) counts them."
)
_PARTS_NOTE = (
    "A part's bytes per step are those of one micro-batch. At stage 3, a schedule all-gathers a part again for further "
    "micro-batches."
)
_RANK_NOTE = (
    "Per rank: the stored shard, the unsharded parameters while they exist, the gradients. Not counted: optimizer "
    "state, activations, buffers, staging of collectives."
)
_UNKNOWN_NOTE = (
    "The number of ranks is not known, so bytes per rank and the all-reduce over replicas of shards are left out. Pass "
    "--world-size N (in Python: Ledger(plan=..., num_shards=N))."
)


_HEADERS = {
    SHARD_DIM: "shard dim",
    SHARD_DIMS: "shard dims",
    "bytes_per_all_gather": "per all-gather",
    PER_STEP[0]: "all-gathered per step",
    PER_STEP[1]: "reduced per step",
    PER_RANK[0]: "shards per rank",
    PER_RANK[1]: "unsharded per rank",
    PER_RANK[2]: "gradients per rank",
}
"""Column -> its header, if that is not its key. `in_one_unit` ends those of bytes with the unit."""
_BYTES = [_HEADERS[key] for key in ("bytes_per_all_gather", *BYTES)]


def ledger_text(ledger: "Ledger") -> str:
    """Return the summary, one row per module class and dtypes, and one per group; equal neighbours share one."""
    all_rows = ledger.rows()
    groups = fold(ledger.group_rows())
    of_one = " (bytes are those of one group of a row)" * any(row["groups"] > 1 for row in groups)
    tables = {
        "Module classes": [cells(row, ("class", "params", "elements", *DTYPE_COLUMNS)) for row in all_rows.classes],
        f"Groups{of_one}": groups,
    }
    drawn = [headed(heading, _in_units(rows)) for heading, rows in tables.items()]
    return "\n\n".join([summary_text(ledger), *drawn, paragraph(_notes(ledger))])


def summary_text(ledger: "Ledger") -> str:
    """Return the title, and one row per pair of all-gather and reduction dtype."""
    rows = [_of_dtypes(row) for row in ledger.rows().summary]
    return f"{paragraph(ledger.title())}\n\n{headed('Dtypes between ranks', _in_units(rows))}"


def parameter_text(ledger: "Ledger") -> str:
    """Return a table of one row per parameter."""
    return render(_in_units(ledger.parameter_rows()))


def verification_text(verification: Verification) -> str:
    """Return a table of two rows per group: the expected and the observed dtypes."""
    groups = verification.to_dict()["groups"]
    has_replicas = any(row["observed"][REPLICAS] for row in groups)
    used = (*DTYPE_COLUMNS, REPLICAS) if has_replicas else DTYPE_COLUMNS
    for row in groups:
        row["expected"] = cells(row["expected"], used)
        row["observed"] = {column: ", ".join(row["observed"][column]) or "-" for column in used}
    rows = [
        {"group": row["group"], "groups": row["groups"], "dtypes": dtypes, **row[dtypes]}
        for row in fold(groups)
        for dtypes in ("expected", "observed")
    ]
    note = (
        f'For "{PER_OP}" no dtype is expected. "-": nothing to observe, or a module that did not run.\n'
        f"C{verification.traffic_result()[1:]}."
    )
    return f"{headed(f'zeroamp: {verification.title()}', rows)}\n\n{paragraph(note)}"


def _notes(ledger: "Ledger") -> str:
    if ledger.ranks.shards(ledger.plan.policy) is None:
        return f"{_STEP_NOTE.format(padding='without the padding to the ranks')}\n{_UNKNOWN_NOTE}"
    rows = ledger.rows()
    notes = [_STEP_NOTE.format(padding="padding included"), *[_PARTS_NOTE] * len(rows.part_columns), _RANK_NOTE]
    others: dict[int, list[str]] = {}
    for row in rows.parameters:
        if dim := row[SHARD_DIM]:
            others.setdefault(dim, []).append(row["parameter"])
    for dim, names in sorted(others.items()):
        notes.append(f"Sharded over dimension {dim}, where dimension 0 would be padded: {some_of(names)}.")
    return "\n".join(notes)


def _of_dtypes(row: Row) -> Row:
    """Return the row of a pair of all-gather and reduction dtype."""
    dtypes = {"all-gathered in": row["param"], "reduced in": row["communication"]}
    return dtypes | {key: row[key] for key in ("params", "elements", "bytes_per_all_gather", *PER_STEP)}


def _in_units(rows: Sequence[Row]) -> list[Row]:
    """Return rows with their bytes in one unit, and the headers of these columns."""
    return in_one_unit([{_HEADERS.get(key, key): value for key, value in row.items()} for row in rows], _BYTES)
