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

WIDTH = 100
"""Columns of text if there is neither `COLUMNS` in the environment nor a terminal."""
_NARROWEST = 24
"""The smallest width, in characters, to which a column of text is narrowed."""
_MOST_TRANSPOSED = 8
"""The largest number of rows with which a table that is too wide is transposed."""


def terminal_width() -> int:
    """Return the number of columns: `COLUMNS` of the environment, else the terminal's, else `WIDTH`."""
    return max(40, shutil.get_terminal_size((WIDTH, 24)).columns)


def paragraph(text: str) -> str:
    """Return each line of `text` wrapped at spaces to the terminal's width."""
    width = terminal_width()
    return "\n".join(textwrap.fill(line, width, break_long_words=False) for line in text.split("\n"))


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
    return "\n\n".join(_part(part, style) for part in parts)


def _part(part: str | Table, style: TableStyle) -> str:
    if isinstance(part, str):
        return {"simple": paragraph(part), "github": part, "html": f"<p>{escape(part)}</p>"}[style]
    heading = {"simple": part.heading, "github": f"### {part.heading}\n", "html": f"<h4>{escape(part.heading)}</h4>"}
    return "\n".join([heading[style], render(part.rows, style), *([_part(part.note, style)] if part.note else [])])


def render(rows: Sequence[Row], style: TableStyle = "simple", *, names: Collection[str] = ()) -> str:
    """Return a table with the rows' keys as its header, and underscores of keys as spaces.

    Integers have commas. The floats of a column have the same number of decimals. A float that would show as 0.00 is
    "<0.01", 0.0 is "0", and None is "-". In a text table that is wider than the terminal, headers and
    the widest columns of text are wrapped. If that is not enough, few rows are transposed, and more are split into two
    tables. Markdown and HTML are not narrowed.

    Args:
        rows: dicts with equal keys.
        style: see `TableStyle`.
        names: keys that are names, such as the FQN of a module. Their headers are the keys, unchanged.
    """
    if not rows:
        return ""
    heads = [key if key in names else key.replace("_", " ") for key in rows[0]]
    columns: list[tuple[Any, ...]] = [
        (head, *_texts([row[key] for row in rows])) for head, key in zip(heads, rows[0], strict=True)
    ]
    if style == "simple":
        turned = list(zip(*columns, strict=True))
        if not _fits(columns) and len(rows) <= _MOST_TRANSPOSED and _fits(turned):
            columns = turned
        if not _fits(columns) and len(rows[0]) > 2:
            name, *keys = rows[0]
            halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
            parts = [[{key: row[key] for key in (name, *half)} for row in rows] for half in halves]
            return "\n\n".join(render(part, names=names) for part in parts)
        # Wrapped here, because tabulate's maxcolwidths fails for a text column with the cell "1,000.0".
        limits = _limits(columns)
        columns = [
            tuple(textwrap.fill(text, limit, break_on_hyphens=False) for text in column)
            for column, limit in zip(columns, limits, strict=True)
        ]
    first, *lines_below = zip(*columns, strict=True)
    aligned = [_alignment(column) for column in columns]
    if style != "simple":
        return tabulate(lines_below, first, tablefmt=style, disable_numparse=True, colalign=aligned)
    # The header is a row, because tabulate pads headers.
    lines: list[Any] = [first, ["-" * limit for limit in limits], *lines_below]
    at = ["bottom", *["top"] * (len(lines_below) + 1)]
    return tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=aligned, rowalign=at)


def _limits(columns: Sequence[tuple[str, ...]]) -> list[int]:
    """Return a width for each column. In a table that is too wide, headers are wrapped, then columns of text."""
    limits = [max(map(len, column)) for column in columns]
    if _width(limits) <= terminal_width():
        return limits
    limits = [max(map(len, (*column[0].split(), *column[1:])), default=0) for column in columns]
    texts = [index for index, column in enumerate(columns) if _alignment(column) == "left"]
    while _width(limits) > terminal_width() and (wide := [index for index in texts if limits[index] > _NARROWEST]):
        limits[max(wide, key=limits.__getitem__)] -= 1
    return limits


def _fits(columns: Sequence[tuple[str, ...]]) -> bool:
    return _width(_limits(columns)) <= terminal_width()


def _width(limits: Sequence[int]) -> int:
    return sum(limits) + 2 * (len(limits) - 1)


def _alignment(column: Sequence[str]) -> str:
    return "right" if all(re.fullmatch(r"[<+-]?[\d,.]+(e[+-]?\d+)?%?|-?", cell) for cell in column[1:]) else "left"


def _texts(values: Sequence[Any]) -> list[str]:
    decimals = decimals_of(max((abs(value) for value in values if _is_finite_float(value)), default=0.0))
    return ["-" if value is None else _text(value, decimals) for value in values]


def _text(value: Any, decimals: int) -> str:
    if _is_finite_float(value):
        return float_text(value, decimals)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _is_finite_float(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def fold(rows: Sequence[Row]) -> list[Row]:
    """Join neighbouring rows that differ only in the group, and count them in "groups": 30 equal layers are one row."""
    folded = []
    for _, equal in groupby(rows, key=lambda row: [value for key, value in row.items() if key != "group"]):
        first, *others = equal
        name = f"{first['group']} … {others[-1]['group']}" if others else first["group"]
        folded.append({"group": name, "groups": 1 + len(others)} | {**first, "group": name})
    return folded
