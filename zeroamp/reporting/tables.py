"""Draws tables of rows by tabulate: as Markdown, as HTML, and as text that fits the terminal."""

import math
import re
import shutil
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, Literal

from tabulate import tabulate

from zeroamp.policies.numbers import decimals_of, float_text

TableStyle = Literal["simple", "github", "html"]
"""tabulate's names: "simple" is plain text, "github" is Markdown, "html" is for notebooks."""

Row = dict[str, Any]
Column = tuple[str, ...]
"""The header and the cells."""

WIDTH = 100
"""Columns of text if there is neither `COLUMNS` in the environment nor a terminal."""
_MOST_TRANSPOSED = 8
"""The largest number of rows with which a table that is too wide is transposed."""
_NARROWEST = 24
"""The smallest width, in characters, to which a column of text is narrowed."""


def terminal_width() -> int:
    """Return the number of columns: `COLUMNS` of the environment, else the terminal's, else `WIDTH`."""
    return max(40, shutil.get_terminal_size((WIDTH, 24)).columns)


def paragraph(text: str) -> str:
    """Return each line of `text` wrapped at spaces to the terminal's width."""
    width = terminal_width()
    return "\n".join(textwrap.fill(line, width, break_long_words=False) for line in text.split("\n"))


def in_one_unit(rows: Sequence[Row], keys: Collection[str]) -> list[Row]:
    """Return the rows with the bytes of some columns in one unit, with which the headers of these columns end.

    The unit is that of the largest number: bytes, KiB, MiB or GiB (1024³ bytes). None stays None.
    """
    largest = max((row[key] or 0 for row in rows for key in keys if key in row), default=0)
    power = next(power for power in (3, 2, 1, 0) if largest >= 1024**power or power == 0)
    unit = ("bytes", "KiB", "MiB", "GiB")[power]

    def cell(key: str, value: Any) -> tuple[str, Any]:
        if key not in keys:
            return key, value
        return f"{key} {unit}", value if value is None or power == 0 else value / 1024**power

    return [dict(cell(*item) for item in row.items()) for row in rows]


@dataclass(frozen=True, slots=True)
class Table:
    """A part of a document: rows, the line above them, and a paragraph below them."""

    heading: str
    rows: Sequence[Row]
    note: str = ""


def document(parts: Sequence[str | Table], style: TableStyle = "simple") -> str:
    """Return paragraphs and tables as one text: wrapped to the terminal, as Markdown, or as HTML."""
    return "\n\n".join(_part(part, style) for part in parts)


def _part(part: str | Table, style: TableStyle) -> str:
    if isinstance(part, str):
        return {"simple": paragraph(part), "github": part, "html": f"<p>{escape(part)}</p>"}[style]
    heading = {"simple": part.heading, "github": f"### {part.heading}\n", "html": f"<h4>{escape(part.heading)}</h4>"}
    return "\n".join([heading[style], render(part.rows, style), *([_part(part.note, style)] if part.note else [])])


def render(rows: Sequence[Row], style: TableStyle = "simple", *, names: Collection[str] = ()) -> str:
    """Return a table with the rows' keys as its header, and underscores of keys as spaces.

    Integers have commas. The floats of a column have the same number of decimals. A float that would show as 0.00 is
    "<0.01", 0.0 is "0", and None is "-". In a text table that is wider than the terminal, headers and the widest
    columns of text are wrapped. If that is not enough, few rows are transposed, and more are split into several tables,
    which all begin with the first column. Markdown and HTML are not narrowed.

    Args:
        rows: dicts with equal keys.
        style: see `TableStyle`.
        names: keys that are names, such as the FQN of a module. Their headers are the keys, unchanged.
    """
    if not rows:
        return ""
    columns = [(key if key in names else key.replace("_", " "), *_texts([row[key] for row in rows])) for key in rows[0]]
    if style != "simple":
        return _tabulated(list(zip(*columns, strict=True)), columns, style)
    turned: list[Column] = list(zip(*columns, strict=True))
    if not _fits(columns) and len(rows) <= _MOST_TRANSPOSED and _fits(turned):
        columns = turned
    first, *others = columns
    parts = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and not _fits([*parts[-1], column]):
            parts.append([first])
        parts[-1].append(column)
    return "\n\n".join(map(_text_table, parts))


def _text_table(columns: Sequence[Column]) -> str:
    limits = _limits(columns)
    # Wrapped here, because tabulate's maxcolwidths fails for a text column with the cell "1,000.0".
    wrapped = [
        [textwrap.fill(text, limit, break_on_hyphens=False) for text in column]
        for column, limit in zip(columns, limits, strict=True)
    ]
    head, *lines = zip(*wrapped, strict=True)
    # The header is a row, because tabulate pads headers.
    at = ["bottom", *["top"] * (len(lines) + 1)]
    return _tabulated([head, ["-" * limit for limit in limits], *lines], columns, "plain", rowalign=at)


def _tabulated(lines: Sequence[Sequence[str]], columns: Sequence[Column], style: str, **options: Any) -> str:
    aligned = [_alignment(column) for column in columns]
    headers = () if style == "plain" else "firstrow"
    return tabulate(lines, headers, tablefmt=style, disable_numparse=True, colalign=aligned, **options)


def _limits(columns: Sequence[Column]) -> list[int]:
    """Return a width for each column. In a table that is too wide, headers are wrapped, then columns of text."""
    limits = [max(map(len, column)) for column in columns]
    if _width(limits) <= terminal_width():
        return limits
    limits = [max(map(len, (*column[0].split(), *column[1:])), default=0) for column in columns]
    texts = [index for index, column in enumerate(columns) if _alignment(column) == "left"]
    while _width(limits) > terminal_width() and (wide := [index for index in texts if limits[index] > _NARROWEST]):
        limits[max(wide, key=limits.__getitem__)] -= 1
    return limits


def _fits(columns: Sequence[Column]) -> bool:
    return _width(_limits(columns)) <= terminal_width()


def _width(limits: Sequence[int]) -> int:
    return sum(limits) + 2 * (len(limits) - 1)


def _alignment(column: Column) -> str:
    return "right" if all(re.fullmatch(r"[<+-]?[\d,.]+(e[+-]?\d+)?%?|-?", cell) for cell in column[1:]) else "left"


def _texts(values: Sequence[Any]) -> list[str]:
    floats = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    decimals = decimals_of(max(map(abs, floats), default=0.0))

    def text(value: Any) -> str:
        if isinstance(value, float) and math.isfinite(value):
            return float_text(value, decimals)
        return f"{value:,}" if type(value) is int else "-" if value is None else str(value)

    return [text(value) for value in values]


def fold(rows: Sequence[Row]) -> list[Row]:
    """Join neighbouring rows that differ only in the group, and count them in "groups": 30 equal layers are one row."""
    folded = []
    for _, equal in groupby(rows, key=lambda row: [value for key, value in row.items() if key != "group"]):
        first, *others = equal
        name = f"{first['group']} … {others[-1]['group']}" if others else first["group"]
        folded.append({"group": name, "groups": 1 + len(others)} | {**first, "group": name})
    return folded
