"""Tables as text that fits the terminal."""

import pytest

from zeroamp.policies.numbers import counted, size_text
from zeroamp.reporting.tables import headed, in_one_unit, paragraph, render, terminal_width


def test_numbers_have_commas_and_the_decimals_of_their_column():
    assert render([{"s": 2886744.4}]).splitlines()[-1] == "2,886,744.40"
    rows = [{"n": 1234567, "gib": 0.01234}, {"n": 2, "gib": 0.00001}, {"n": 3, "gib": 0.0}, {"n": None, "gib": None}]
    assert [line.split() for line in render(rows).splitlines()[2:]] == [
        ["1,234,567", "0.0123"],
        ["2", "<0.0001"],
        ["3", "0"],
        ["-", "-"],
    ]


def test_units():
    rows = [{"name": "a", "peak": 3 * 2**20}, {"name": "b", "peak": None}]
    assert in_one_unit(rows, ["peak", "absent"]) == [{"name": "a", "peak MiB": 3.0}, {"name": "b", "peak MiB": None}]
    assert in_one_unit([{"peak": 0}], ["peak"]) == [{"peak B": 0}]
    texts = ["0 B", "1,023 B", "1.00 KiB", "1.50 MiB", "4,096.00 GiB"]
    assert [size_text(size) for size in (0, 1023, 2**10, 3 * 2**19, 2**42)] == texts


def test_a_number_has_the_noun_in_its_number():
    assert [counted(number, "rank") for number in (0, 1, 2048)] == ["0 ranks", "1 rank", "2,048 ranks"]
    assert counted(2, "micro-batch", "micro-batches") == "2 micro-batches"


@pytest.mark.parametrize(("columns", "width"), [("72", 72), ("3", 40), (None, 100), ("", 100)])
def test_the_width_is_that_of_columns_or_100(monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)  # no terminal
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width
    assert max(map(len, paragraph("word " * 100).splitlines())) <= width


def test_a_wide_table_is_split(monkeypatch):
    """A wide table is split and each part begins with the first column."""
    monkeypatch.setenv("COLUMNS", "60")
    rows = [{"name": f"row {row}", **{f"number {index}": index for index in range(20)}} for row in range(20)]
    parts = render(rows).split("\n\n")
    assert len(parts) > 1
    assert all(part.splitlines()[-1].startswith("row 19") for part in parts)
    heads = [line for part in parts for line in part.splitlines() if not line.startswith("row")]
    shown = [word for line in heads for word in line.split() if word.isdigit()]
    assert shown == [str(index) for index in range(20)]


def test_a_long_name_and_a_long_text_are_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    rows = [{"name": "model.layers.0." + "x" * 50 + ".weight", "why": "Linear is a safe module " * 4}] * 20
    lines = render(rows).splitlines()
    assert max(map(len, lines)) <= 60
    column = lines[0].index("why")
    names = "".join(line[:column].strip() for line in lines[2:])
    assert names == rows[0]["name"] * 20
    assert " ".join(line[lines[0].index("why") :].strip() for line in lines[2:]).count("safe module") == 80


def test_tables_and_paragraphs_have_no_control_characters():
    name = "a\x1b[31mb\x07\u202e"
    texts = [render([{name: 1, "name": name}] * 2), headed(name, [{name: name}]), paragraph(f"{name}\n{name}")]
    for text in texts:
        assert text.replace("\n", "").isprintable()
        assert "a\\x1b[31mb\\x07\\u202e" in text
