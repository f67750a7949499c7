"""Draws tables of rows: as Markdown, and as text that fits the terminal.

A text table that is too wide is narrowed in this order: long cells are wrapped at spaces or shortened in the middle. A
table of few rows is transposed. Any other is split into several tables, each with the first column.
"""

import math
import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tabulate import tabulate

TableStyle = Literal["simple", "github"]
"""tabulate's names: "simple" is plain text, "github" is Markdown."""

Row = dict[str, Any]

WIDTH = 100
"""Columns of text if there is neither `COLUMNS` in the environment nor a terminal."""
SOFT_HYPHEN = "\u00ad"
"""In a header, a place at which a word may be broken if the table is too wide."""

_NO_BREAK = "\u00a0"
"""A space in a name, at which a header is not wrapped."""

_GAP = 2
_NARROWEST = 24
"""The smallest width, in characters, to which a column of longer cells is narrowed."""
_SMALLEST_WIDTH = 40
_MOST_TRANSPOSED = 8
"""The largest number of rows with which a table is transposed."""
_DIGITS = 3
"""Significant digits of the largest number of a column. A column has at least two decimals."""


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


def gib_text(num_bytes: int) -> str:
    """Return bytes of memory as text in GiB, with as many digits as `render` gives a column of one number."""
    return f"{_texts([gib(num_bytes)])[0]} GiB"


def gb(num_bytes: int | None) -> float | None:
    """Return bytes of communication in GB (10⁹ bytes)."""
    return None if num_bytes is None else num_bytes / 1e9


def render(
    rows: Sequence[Row],
    style: TableStyle = "simple",
    *,
    names: Collection[str] = (),
    headers: Mapping[str, str] | None = None,
    width: int | None = None,
) -> str:
    """Return a table with the rows' keys as its header, and underscores of keys as spaces.

    Integers have commas. The floats of a column have the same number of decimals. A float that would show as 0.00 is
    "<0.01", 0.0 is "0", and None is "-".

    Args:
        rows: dicts with equal keys.
        style: see `TableStyle`. Markdown is not narrowed.
        names: keys that are names, such as the FQN of a module. Their headers are the keys, unchanged.
        headers: key -> its header, if not the key.
        width: characters of a line of text. None stands for `terminal_width()`.
    """
    if not rows:
        return ""
    columns = [
        _Column(
            key.replace(" ", _NO_BREAK) if key in names else (headers or {}).get(key, key).replace("_", " "),
            tuple(_texts([row[key] for row in rows])),
            all(_is_number(row[key]) for row in rows),
        )
        for key in rows[0]
    ]
    if style == "github":
        return _draw([replace(column, head=column.head.replace(SOFT_HYPHEN, "")) for column in columns], style)
    return _fit(columns, terminal_width() if width is None else width)


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    cells: tuple[str, ...]
    is_right: bool
    """Whether the cells are numbers, which are aligned right."""

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.head, *self.cells) for line in text.split("\n"))


def _is_number(value: Any) -> bool:
    """Return whether a cell may be in a column of numbers: a number, the text of one, "-", "" or None."""
    if isinstance(value, str):
        return value in ("-", "") or re.fullmatch(r"[<+-]?[\d,.]+(e[+-]?\d+)?%?", value) is not None
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _texts(values: Sequence[Any]) -> list[str]:
    floats = [abs(value) for value in values if isinstance(value, float) and math.isfinite(value)]
    largest = max(floats, default=0.0)
    decimals = 2 if largest == 0 else min(12, max(2, _DIGITS - 1 - math.floor(math.log10(largest))))
    return [_text(value, decimals) for value in values]


def _text(value: Any, decimals: int) -> str:
    if value is None:
        return "-"
    if value == 0 and isinstance(value, float):
        return "0"
    if isinstance(value, float) and math.isfinite(value):
        is_hidden = 0 < abs(value) < 0.5 * 10**-decimals
        return f"<{10**-decimals:.{decimals}f}" if is_hidden else f"{value:,.{decimals}f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _fit(columns: list[_Column], width: int) -> str:
    """Return the table in the first form that fits into `width`: see the top of this file."""
    whole = [_with_wrapped_head(column, hyphenate=False) for column in columns]
    if _width(whole) <= width:
        return _draw(whole)
    hyphenated = [_with_wrapped_head(column, hyphenate=True) for column in columns]
    if _width(narrow := _narrowed(hyphenated, width)) <= width:
        return _draw(narrow)
    if (turned := _transposed(columns)) and _width(turned := _narrowed(turned, width)) <= width:
        return _draw(turned)
    return "\n\n".join(_draw(part) for part in _split(hyphenated, width))


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _with_wrapped_head(column: _Column, *, hyphenate: bool) -> _Column:
    """Return the column with its header wrapped to the width of the cells, or of the header's longest word."""
    head = column.head if hyphenate else column.head.replace(SOFT_HYPHEN, "")
    pieces = [word.split(SOFT_HYPHEN) for word in head.split(" ")]
    longest = max((len(piece) + (piece is not word[-1]) for word in pieces for piece in word), default=0)
    room = max(longest, *(len(line) for cell in column.cells for line in cell.split("\n")))
    lines: list[str] = [""]
    for word in pieces:
        start = f"{lines[-1]} " if lines[-1] else ""
        if len(start) + sum(map(len, word)) <= room:
            lines[-1] = start + "".join(word)
            continue
        lines += [] if not lines[-1] else [""]
        for index, piece in enumerate(word):
            is_last = index == len(word) - 1
            if len(lines[-1]) + len(piece) + (not is_last) <= room:
                lines[-1] += piece
            else:
                lines[-1] += "-"
                lines.append(piece)
    return replace(column, head="\n".join(lines))


def _narrowed(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Return the columns, with the widest column of text narrowed until all fit or none can be narrowed further."""
    narrow = list(columns)
    while (excess := _width(narrow) - width) > 0:
        texts = [index for index, column in enumerate(narrow) if not column.is_right and column.width > _NARROWEST]
        if not texts:
            break
        widest = max(texts, key=lambda index: narrow[index].width)
        others = sorted((narrow[index].width for index in texts if index != widest), reverse=True)
        floor = max(_NARROWEST, others[0] if others else 0)
        target = max(floor, narrow[widest].width - excess)
        target = target if target < narrow[widest].width else narrow[widest].width - 1
        narrow[widest] = _to_width(columns[widest], target)
    return narrow


def _to_width(column: _Column, width: int) -> _Column:
    return replace(
        column,
        head="\n".join(line for text in column.head.split("\n") for line in _wrap(text, width)),
        cells=tuple("\n".join(_wrap(cell, width)) for cell in column.cells),
    )


def _wrap(cell: str, width: int) -> list[str]:
    """Return the lines of a cell, wrapped at spaces. Words longer than `width` are shortened in the middle."""
    words = " ".join(_shortened(word, width) for word in cell.split(" "))
    return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False) or [""]


def _shortened(word: str, width: int) -> str:
    if len(word) <= width:
        return word
    end = (width - 1) // 2
    return f"{word[: width - 1 - end]}…{word[len(word) - end :]}"


def _transposed(columns: Sequence[_Column]) -> list[_Column] | None:
    """Return a column of the headers and then one column per row; None if there are too many rows."""
    first, *others = columns
    if len(first.cells) > _MOST_TRANSPOSED or not others:
        return None
    heads = tuple(column.head.replace(SOFT_HYPHEN, "") for column in others)
    rows = [
        _Column(first.cells[index], tuple(column.cells[index] for column in others), is_right=True)
        for index in range(len(first.cells))
    ]
    return [_Column(first.head.replace(SOFT_HYPHEN, ""), heads, is_right=False), *rows]


def _split(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Return several tables, each with the first column and as many others as fit into `width`."""
    first = _to_width(columns[0], max(_NARROWEST, width // 2)) if columns[0].width > width // 2 else columns[0]
    parts: list[list[_Column]] = []
    for column in columns[1:]:
        room = width - first.width - _GAP
        column = _to_width(column, room) if column.width > room and not column.is_right else column
        if not parts or _width([*parts[-1], column]) > width:
            parts.append([first])
        parts[-1].append(column)
    return parts or [[first]]


def _draw(columns: Sequence[_Column], style: TableStyle = "simple") -> str:
    if style == "simple":
        return _draw_text(columns)
    return tabulate(
        list(zip(*(column.cells for column in columns), strict=True)),
        headers=[column.head.replace(_NO_BREAK, " ") for column in columns],
        tablefmt=style,
        disable_numparse=True,
        colalign=["right" if column.is_right else "left" for column in columns],
    )


def _draw_text(columns: Sequence[_Column]) -> str:
    """Return a table in tabulate's style "simple", without tabulate's padding around headers."""
    rule = (" " * _GAP).join("-" * column.width for column in columns)
    rows = zip(*(column.cells for column in columns), strict=True)
    return "\n".join(
        [
            *_lines([column.head for column in columns], columns, at_bottom=True),
            rule,
            *(line for row in rows for line in _lines(row, columns)),
        ]
    )


def _lines(texts: Sequence[str], columns: Sequence[_Column], *, at_bottom: bool = False) -> list[str]:
    """Return the lines of one row, whose cells may have several lines."""
    cells = [text.split("\n") for text in texts]
    height = max(map(len, cells))
    lines = []
    for index in range(height):
        parts = []
        for cell, column in zip(cells, columns, strict=True):
            at = index - (height - len(cell) if at_bottom else 0)
            text = cell[at] if 0 <= at < len(cell) else ""
            parts.append(text.rjust(column.width) if column.is_right else text.ljust(column.width))
        lines.append((" " * _GAP).join(parts).rstrip().replace(_NO_BREAK, " "))
    return lines
