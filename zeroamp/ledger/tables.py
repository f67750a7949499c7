"""Tables of rows, as text and as Markdown."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from tabulate import tabulate

TableStyle = Literal["simple", "github"]
"""tabulate's names: "simple" is plain text, "github" is Markdown."""

Row = dict[str, Any]


def render(
    rows: Sequence[Row],
    style: TableStyle = "simple",
    *,
    names: Collection[str] = (),
    headers: Mapping[str, str] | None = None,
) -> str:
    """Return a table with the rows' keys as its header, underscores as spaces; whole numbers with commas.

    Args:
        rows: of equal keys.
        style: see `TableStyle`.
        names: keys that are names of something, and stay as they are.
        headers: key -> another header than the key.
    """
    wrapped = "\n" if style == "simple" else " "
    shown = {
        key: key if key in names else (headers or {}).get(key, key).replace("_", " ").replace(" per ", f"{wrapped}per ")
        for row in rows[:1]
        for key in row
    }
    return tabulate(rows, headers=shown, tablefmt=style, intfmt=",")


def cells(row: Row, columns: Sequence[str]) -> Row:
    """Return the row's columns, with "-" for None."""
    return {column: "-" if row[column] is None else row[column] for column in columns}


def fold(rows: Sequence[Row]) -> list[Row]:
    """Join neighbouring rows that are equal but for the group: thirty decoder layers are one line."""
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
