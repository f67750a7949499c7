"""Draws tables of rows by tabulate, as text that fits the terminal."""

import math
import re
import shutil
import textwrap
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from tabulate import tabulate

from zeroamp.policies.errors import printable
from zeroamp.policies.numbers import byte_unit, decimals_of, float_text

Row = dict[str, Any]
Column = tuple[str, ...]
"""The header and the cells."""

WIDTH = 100
"""Columns of text if there is neither `COLUMNS` in the environment nor a terminal."""
_NARROWEST = 24
"""The smallest width, in characters, to which a column of text is narrowed."""


def terminal_width() -> int:
    """Return the number of columns: `COLUMNS` of the environment, else the terminal's, else `WIDTH`."""
    return max(40, shutil.get_terminal_size((WIDTH, 24)).columns)


def paragraph(text: str) -> str:
    """Return each line of `text` wrapped at spaces to the terminal's width. All of it is printable."""
    width = terminal_width()
    return "\n".join(textwrap.fill(line, width, break_long_words=False) for line in printable(text).split("\n"))


def in_one_unit(rows: Sequence[Row], keys: Collection[str]) -> list[Row]:
    """Return the rows with the bytes of some columns in one unit, with which the headers of these columns end.

    The unit is that of the largest number: B, KiB, MiB or GiB (1024³ bytes). None stays None.
    """
    unit, size = byte_unit(max((row[key] or 0 for row in rows for key in keys if key in row), default=0))

    def cell(key: str, value: Any) -> tuple[str, Any]:
        if key not in keys:
            return key, value
        return f"{key} {unit}", value if value is None or size == 1 else value / size

    return [dict(cell(*item) for item in row.items()) for row in rows]


def headed(heading: str, rows: Sequence[Row]) -> str:
    """Return a table with a line above it."""
    return f"{paragraph(heading)}\n{render(rows)}"


def render(rows: Sequence[Row]) -> str:
    """Return a table with the rows' keys, which are equal, as its header.

    Integers have commas. The floats of a column have the same number of decimals. A float that would show as 0.00 is
    "<0.01", 0.0 is "0", and None is "-". In a table that is wider than the terminal, headers and the widest columns of
    text are wrapped. If that is not enough, the table is split into several, which all begin with the first column.
    Characters that are not printable, of the names of a model or of a file, are escaped.
    """
    if not rows:
        return ""
    first, *others = ((printable(key), *_texts([row[key] for row in rows])) for key in rows[0])
    parts = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and _width(_limits([*parts[-1], column])) > terminal_width():
            parts.append([first])
        parts[-1].append(column)
    return "\n\n".join(_tabulated(part) for part in parts)


def _tabulated(columns: Sequence[Column]) -> str:
    aligned = [_alignment(column) for column in columns]
    limits = _limits(columns)
    # Wrapped here, because tabulate's maxcolwidths fails for a cell such as "1,000.0" in a column of text.
    wrapped = [
        [textwrap.fill(text, limit, break_on_hyphens=False) for text in column]
        for column, limit in zip(columns, limits, strict=True)
    ]
    head, *lines = zip(*wrapped, strict=True)
    # The header is a row, because tabulate pads headers.
    at = ["bottom", *["top"] * (len(lines) + 1)]
    rows = [head, ["-" * limit for limit in limits], *lines]
    return tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=aligned, rowalign=at)


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
        return f"{value:,}" if type(value) is int else "-" if value is None else printable(str(value))

    return [text(value) for value in values]


def fold(rows: Sequence[Row]) -> list[Row]:
    """Join neighbouring rows that differ only in the group, and count them in "groups": 30 equal layers are one row."""
    folded = []
    for _, equal in groupby(rows, key=lambda row: [value for key, value in row.items() if key != "group"]):
        first, *others = equal
        name = f"{first['group']} … {others[-1]['group']}" if others else first["group"]
        folded.append({"group": name, "groups": 1 + len(others)} | {**first, "group": name})
    return folded
