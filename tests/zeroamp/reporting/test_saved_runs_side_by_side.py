"""`zeroamp report`: a table of runs side by side."""

import json

import pytest

from tests.processes import cli
from tests.zeroamp.reporting.records import record, write_run
from zeroamp.reporting.saved_runs import read_run


@pytest.fixture
def runs(tmp_path):
    one = [record(step, loss=5.0 - step, tokens_per_s=100.0 * step, num_tokens=50) for step in (1, 2, 3)]
    two = [record(step, loss=4.0 - step, skipped=step == 2, peak_active_gib=1.5, mfu=0.25) for step in (1, 2)]
    return write_run(tmp_path / "one.jsonl", one), write_run(tmp_path / "two.jsonl", two, device="NVIDIA H200")


def run(*arguments):
    return cli.run("report", *arguments)


def rows(text):
    """label -> cells, of a Markdown table."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {label: cells for label, *cells in (lines[0], *lines[2:])}


def test_runs_are_side_by_side(runs):
    code, stdout, stderr = run(*runs, "--markdown")
    assert (code, stderr) == (0, "")
    table = rows(stdout)
    assert table[""] == ["one", "two"]
    assert table["ranks, device"] == ["2, cpu", "2, NVIDIA H200"]
    assert table["steps (skipped)"] == ["3 (0)", "1 (1)"]
    assert table["tokens"] == ["150", "-"]
    assert table["loss, first"] == ["4.0000", "3.0000"]
    assert table["loss, last"] == ["2.0000", "3.0000"]
    assert table["tokens/s, median"] == ["250", "-"]  # of the second and third step
    assert table["MFU, median"] == ["-", "25.0%"]
    assert table["ms per step, median"] == ["1,000.0", "1,000.0"]
    assert table["- forward"] == ["20.0%", "20.0%"]
    assert table["peak GiB, active"] == ["-", "1.50"]
    assert "model TFLOP/s per rank" not in table  # known of none


def test_one_run_is_a_table_of_one_column_and_equal_names_are_told_apart(runs):
    assert rows(run(runs[0], "--markdown")[1])[""] == ["one"]
    assert rows(run(runs[0], runs[0], "--markdown")[1])[""] == ["one (1)", "one (2)"]


@pytest.mark.parametrize("style", [[], ["--markdown"]])
def test_runs_have_their_own_names_and_parts_of_the_step_are_marked(tmp_path, style):
    path = write_run(tmp_path / "x_nan ms per step.jsonl", [record(1)])
    code, stdout, _ = run(path, path, *style)
    assert code == 0
    assert "x_nan ms per step (1)" in stdout
    labels = [line.strip("| ").replace("|", "  ").split("  ")[0].strip() for line in stdout.splitlines()]
    step = labels.index("ms per step, median")
    assert labels[step + 1 : step + 4] == ["- forward", "- backward", "- exposed communication"]


def test_lines_that_json_reads_but_no_run_has_are_left_out(tmp_path):
    path = write_run(tmp_path / "one.jsonl", [record(1)])
    header, step = map(json.loads, path.read_text().splitlines())
    broken = [header | {"plan": None}, step | {"traffic_bytes": None}, {"kind": "warning", "name": None}]
    path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in broken))
    code, stdout, stderr = run(path, "--markdown")
    assert code == 0
    assert stderr == f"{path}, from line 3: 3 lines are skipped: cut, or not written by RunReport\n"
    assert (rows(stdout)["steps (skipped)"], rows(stdout)["starts"]) == (["1 (0)"], ["1"])
    assert read_run(path).num_unreadable == 3


def test_a_file_that_is_no_run_is_an_error_without_a_traceback(tmp_path):
    code, stdout, stderr = run(tmp_path / "none.jsonl")
    assert (code, stdout) == (1, "")
    assert stderr.startswith(f"Error: {tmp_path / 'none.jsonl'} cannot be read")


def test_a_file_of_something_else_has_one_warning_and_not_one_per_line(tmp_path):
    path = tmp_path / "some.log"
    path.write_text("[]\nnothing\n" * 500)
    code, _, stderr = run(path)
    assert code == 1
    warning, error = stderr.splitlines()
    assert warning == f"{path}, from line 1: 1,000 lines are skipped: cut, or not written by RunReport"
    assert error.startswith(f"Error: {path} has no header of a RunReport")
