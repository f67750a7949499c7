"""Draws tables of rows by tabulate: as Markdown, as HTML, and as text that fits the terminal.

A text table that is too wide is narrowed by wrapping the cells of its widest columns of text. If that is not enough, a
table of few rows is transposed, and any other is split into several tables, each with the first column.
"""

import math
import re
import shutil
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from tabulate import tabulate

from zeroamp.policies.numbers import decimals_of, float_text

TableStyle = Literal["simple", "github", "html"]
"""tabulate's names: "simple" is plain text, "github" is Markdown, "html" is for notebooks."""

Row = dict[str, Any]
_Column = tuple[str, ...]
"""The texts of a column: its header, and one cell per row."""

WIDTH = 100
"""Columns of text if there is neither `COLUMNS` in the environment nor a terminal."""
_GAP = 2
_NARROWEST = 24
"""The smallest width, in characters, to which a column of text is narrowed."""
_SMALLEST_WIDTH = 40
_MOST_TRANSPOSED = 8
"""The largest number of rows with which a table is transposed."""


def terminal_width() -> int:
    """Return the number of columns: `COLUMNS` of the environment, else the terminal's, else `WIDTH`."""
    return max(_SMALLEST_WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def paragraph(text: str, width: int | None = None) -> str:
    """Return each line of `text` wrapped at spaces to `width` characters; None stands for the terminal's width."""
    width = terminal_width() if width is None else width
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")
    )


def gib(num_bytes: int | None) -> float | None:
    """Return bytes of memory in GiB (1024³ bytes)."""
    return None if num_bytes is None else num_bytes / 2**30


def gb(num_bytes: int | None) -> float | None:
    """Return bytes of communication in GB (10⁹ bytes)."""
    return None if num_bytes is None else num_bytes / 1e9


def in_one_unit(rows: Sequence[Row], keys: Collection[str]) -> list[Row]:
    """Return the rows with the bytes of some columns in one unit, with which the headers of these columns end.

    The unit is that of the largest number: bytes, KiB, MiB or GiB (1024³ bytes). None stays None.
    """
    largest = max((row[key] for row in rows for key in keys if row[key] is not None), default=0)
    power = next(power for power in (3, 2, 1, 0) if largest >= 1024**power or power == 0)
    unit = ("bytes", "KiB", "MiB", "GiB")[power]

    def scaled(num_bytes: int | None) -> float | int | None:
        return num_bytes if num_bytes is None or power == 0 else num_bytes / 1024**power

    return [
        {f"{key} {unit}" if key in keys else key: scaled(row[key]) if key in keys else row[key] for key in row}
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Table:
    """A part of a document: rows, the line above them, and a paragraph below them."""

    heading: str
    rows: Sequence[Row]
    note: str = ""


def document(parts: Sequence[str | Table], style: TableStyle = "simple") -> str:
    """Return paragraphs and tables as one text: wrapped to the terminal, as Markdown, or as HTML."""
    if style == "html":
        return "\n".join(_in_html(part) for part in parts)
    return "\n\n".join(_in_text(part, style) for part in parts)


def _in_text(part: str | Table, style: TableStyle) -> str:
    if isinstance(part, str):
        return part if style == "github" else paragraph(part)
    if style == "github":
        return f"### {part.heading}\n\n{render(part.rows, style)}"
    return "\n".join([part.heading, render(part.rows), *([paragraph(part.note)] if part.note else [])])


def _in_html(part: str | Table) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    return f"<h4>{escape(part.heading)}</h4>\n{render(part.rows, 'html')}{_in_html(part.note) if part.note else ''}"


def render(
    rows: Sequence[Row],
    style: TableStyle = "simple",
    *,
    names: Collection[str] = (),
    width: int | None = None,
) -> str:
    """Return a table with the rows' keys as its header, and underscores of keys as spaces.

    Integers have commas. The floats of a column have the same number of decimals. A float that would show as 0.00 is
    "<0.01", 0.0 is "0", and None is "-".

    Args:
        rows: dicts with equal keys.
        style: see `TableStyle`. Markdown and HTML are not narrowed.
        names: keys that are names, such as the FQN of a module. Their headers are the keys, unchanged.
        width: characters of a line of text. None stands for `terminal_width()`.
    """
    if not rows:
        return ""
    heads = [key if key in names else key.replace("_", " ") for key in rows[0]]
    columns = [(head, *_texts([row[key] for row in rows])) for head, key in zip(heads, rows[0], strict=True)]
    if style != "simple":
        cells = [column[1:] for column in columns]
        aligned = [_alignment(column) for column in columns]
        return tabulate(list(zip(*cells, strict=True)), heads, tablefmt=style, disable_numparse=True, colalign=aligned)
    width = terminal_width() if width is None else width
    turned = list(zip(*columns, strict=True))
    for candidate in [columns, turned] if len(rows) <= _MOST_TRANSPOSED else [columns]:
        if _width(limits := _limits(candidate, width)) <= width:
            return _draw(candidate, limits)
    return "\n\n".join(_draw(part, _limits(part, width)) for part in _split(columns, width))


def _limits(columns: Sequence[_Column], width: int) -> list[int]:
    """Return the width of each column. In a table that is too wide, headers are wrapped, then columns of text."""
    limits = [max(map(len, column)) for column in columns]
    if _width(limits) <= width:
        return limits
    limits = [max(map(len, (*column[0].split(), *column[1:])), default=0) for column in columns]
    texts = [index for index, column in enumerate(columns) if _alignment(column) == "left"]
    while _width(limits) > width and (wide := [index for index in texts if limits[index] > _NARROWEST]):
        limits[max(wide, key=limits.__getitem__)] -= 1
    return limits


def _width(limits: Sequence[int]) -> int:
    return sum(limits) + _GAP * (len(limits) - 1)


def _split(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Return several tables, each with the first column and as many others as fit into `width`."""
    first, *others = columns
    parts: list[list[_Column]] = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and _width(_limits([*parts[-1], column], width)) > width:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _draw(columns: Sequence[_Column], limits: Sequence[int]) -> str:
    # Cells are wrapped here, because tabulate's maxcolwidths fails for "1,000.0". The header is a row: it pads headers.
    heads, *rows = zip(*(_wrapped(column, limit) for column, limit in zip(columns, limits, strict=True)), strict=True)
    return tabulate(
        [heads, ["-" * limit for limit in limits], *rows],
        tablefmt="plain",
        disable_numparse=True,
        colalign=[_alignment(column) for column in columns],
        rowalign=["bottom", *["top"] * (len(rows) + 1)],
    )


def _wrapped(column: _Column, width: int) -> list[str]:
    return [textwrap.fill(text, width, break_on_hyphens=False) for text in column]


def _alignment(column: _Column) -> str:
    return "right" if all(_is_number(cell) for cell in column[1:]) else "left"


def _is_number(value: Any) -> bool:
    """Return whether a cell may be in a column of numbers: a number, the text of one, "-", "" or None."""
    if isinstance(value, str):
        return value in ("-", "") or re.fullmatch(r"[<+-]?[\d,.]+(e[+-]?\d+)?%?", value) is not None
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _texts(values: Sequence[Any]) -> list[str]:
    floats = [abs(value) for value in values if isinstance(value, float) and math.isfinite(value)]
    decimals = decimals_of(max(floats, default=0.0))
    return [_text(value, decimals) for value in values]


def _text(value: Any, decimals: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and math.isfinite(value):
        return float_text(value, decimals)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


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
