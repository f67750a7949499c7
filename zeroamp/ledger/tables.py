"""Prepares rows for the ledger's tables: replaces None, and joins equal neighbours."""

from collections.abc import Sequence

from zeroamp.policies.tables import Row


def cells(row: Row, columns: Sequence[str]) -> Row:
    """Return the row's columns, with "-" for None."""
    return {column: "-" if row[column] is None else row[column] for column in columns}


def fold(rows: Sequence[Row]) -> list[Row]:
    """Join neighbouring rows that differ only in the group, and count them in "groups": 30 equal layers are one row."""
    folded: list[Row] = []
    for row in rows:
        last = folded[-1] if folded else None
        if last and all(last[key] == row[key] for key in row if key != "group"):
            last["last"], last["groups"] = row["group"], last["groups"] + 1
        else:
            folded.append({**row, "last": "", "groups": 1})
    return [
        {
            "group": f"{row['group']} … {last}" if (last := row.pop("last")) else row["group"],
            "groups": row.pop("groups"),
            **{key: value for key, value in row.items() if key != "group"},
        }
        for row in folded
    ]
