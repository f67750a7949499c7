"""What is read of a run that went back to a checkpoint, or began again: every step once."""

import json
import math
import os
import random
import re

import pytest

import zeroamp
from tests.processes import cli
from tests.zeroamp.reporting.records import record, write_run
from zeroamp.reporting.saved_runs import runs_to_dict, table
from zeroamp.reporting.step_record import StepRecord


def walk(seed):
    """The records of a run that goes back now and then, in the order of the file, and those that were not lost."""
    choose = random.Random(seed)
    file, path = [], []
    while len(file) < 60:
        if choose.random() < 0.1:
            del path[choose.randint(0, len(path)) :]
        for _ in range(choose.randint(1, 3)):
            skipped = choose.random() < 0.5
            num_skipped = sum(each.skipped for each in path) + skipped
            step = len(path) + 1 - num_skipped
            file.append(record(step, loss=float(len(file)), skipped=skipped, num_skipped=num_skipped))
            path.append(file[-1])
    return file, path


def test_steps_that_were_lost_are_left_out(tmp_path):
    for seed in range(30):
        file, path = walk(seed)
        assert zeroamp.read_run(write_run(tmp_path / "run.jsonl", file)).records == path


@pytest.mark.timeout(20)
def test_only_a_regular_file_is_read(tmp_path):
    path = tmp_path / "run.jsonl"
    os.mkfifo(path)
    with pytest.raises(zeroamp.CheckpointError, match="not a regular file"):
        zeroamp.read_run(path)


def step_line(**fields):
    return json.dumps({**record(2).to_json(), **fields})


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"kind":' * 100_000,
        "x" * 17 * 1024**2,
        json.dumps({"kind": "header", "world_size": 2, "device": "cpu", "plan": None}),
        step_line(loss=10**4000),
        step_line(loss=None),
        step_line(loss="much"),
        step_line(step_s=[1.0]),
        step_line(lr=[[1]]),
        step_line(lr=0.1),
        step_line(traffic_bytes=3),
        step_line(traffic_bytes={"all-gather": 10**4000}),
        step_line(traffic_bytes={"all_gather bf16": "many"}),
    ],
    ids=lambda line: line[-40:],
)
def test_a_line_that_no_run_wrote_is_left_out(tmp_path, line):
    path = write_run(tmp_path / "run.jsonl", [record(1)])
    path.write_text(f"{path.read_text()}{line}\n{json.dumps(record(2).to_json())}\n")
    code, stdout, stderr = report(path, "--json")
    assert code == 0
    assert stderr.startswith(f"{path}, from line 3: ")
    assert (rows(stdout)["steps (skipped)"], rows(stdout)["starts"]) == (["2 (0)"], ["1"])
    run = zeroamp.read_run(path)
    assert [each.step for each in run.records] == [1, 2]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_have_is_shown_as_text(tmp_path, number):
    path = write_run(tmp_path / "run.jsonl", [record(1)], device="DEVICE", more=["DEVICE"])
    path.write_text(path.read_text().replace('"DEVICE"', number))
    run = zeroamp.read_run(path)
    assert number in table([run])
    assert run.headers[0]["more"] == [number]
    json.dumps(runs_to_dict([run]), allow_nan=False)


def test_no_text_of_a_file_reaches_the_terminal_as_an_escape(tmp_path):
    path = write_run(tmp_path / "run.jsonl", [record(1)], device="\x1b]0;owned\x07", plan={"mode": "\x1b[31m"})
    text = table([zeroamp.read_run(path)])
    assert "\x1b" not in text
    assert "\\x1b[31m" in text


def test_a_record_survives_strict_json():
    before = record(7, loss=math.inf, grad_norm=-math.inf, traffic_bytes={"all_gather bf16": 12}, num_tokens=3)
    assert StepRecord.from_json(json.loads(json.dumps(before.to_json(), allow_nan=False))) == before
    assert math.isnan(StepRecord.from_json(json.loads(json.dumps(record(loss=math.nan).to_json()))).loss)
    assert StepRecord.from_json(record().to_json() | {"colour": 3}) == record()
    assert record().other_s == pytest.approx(0.3)


@pytest.fixture
def runs(tmp_path):
    one = [record(step, loss=5.0 - step, tokens_per_s=100.0 * step, num_tokens=50) for step in (1, 2, 3)]
    two = [record(step, loss=4.0 - step, skipped=step == 2, peak_active_gib=1.5) for step in (1, 2)]
    return write_run(tmp_path / "one.jsonl", one), write_run(tmp_path / "two.jsonl", two, device="NVIDIA H200")


def report(*arguments):
    return cli.run("report", *arguments)


def rows(text):
    """label -> cells, of the table."""
    return {label: cells for label, *cells in (row.values() for row in json.loads(text)["summary"])}


def test_runs_are_side_by_side(runs):
    code, stdout, stderr = report(*runs, "--json")
    assert (code, stderr) == (0, "")
    shown = rows(stdout)
    assert list(json.loads(stdout)["summary"][0]) == ["", "one", "two"]
    assert shown["ranks, device"] == ["2, cpu", "2, NVIDIA H200"]
    assert shown["steps (skipped)"] == ["3 (0)", "1 (1)"]
    assert shown["tokens"] == ["150", "-"]
    assert shown["loss, first"] == ["4.0000", "3.0000"]
    assert shown["loss, last"] == ["2.0000", "3.0000"]
    assert shown["tokens/s, median"] == ["250", "-"]  # of the second and third step
    assert shown["ms per step, median"] == ["1,000.0", "1,000.0"]
    assert shown["- forward"] == ["20.0%", "20.0%"]
    assert shown["peak memory, active"] == ["-", "1.50 GiB"]
    assert "allocator flushes" not in shown  # known of none


def test_two_runs_show_the_settings_that_differ(tmp_path):
    same = {"versions": {"zeroamp": "0.3.0", "torch": "2.13.0"}, "config": {"bf16": {"enabled": True}}}
    one = write_run(tmp_path / "one.jsonl", [record(1)], optimizers={"0": {"type": "AdamW", "lr": "0.1"}}, **same)
    rated = [record(1, lr=(0.1,)), record(2, lr=(0.01, 0.02))]
    two = write_run(tmp_path / "two.jsonl", rated, optimizers={"0": {"type": "AdamW", "lr": "0.2"}}, **same)
    found = json.loads(report(one, two, "--json")[1])["differences"]
    assert found == [{"": "optimizers.0.lr", "one": "0.1", "two": "0.2"}]
    text = report(one, two)[1]
    assert "Settings that differ" in text
    assert re.search(r"^learning rate, first +0\.1 +0\.1$", text, re.MULTILINE)
    slower = write_run(tmp_path / "slower.jsonl", [record(1, lr=(0.05,))], **same)
    old = write_run(tmp_path / "old.jsonl", [record(1)], **same)
    rows = json.loads(report(old, slower, "--json")[1])["differences"]
    assert [row["slower"] for row in rows] == ["0.05", "0.05"]
    assert "are the same in all runs" in report(old, old)[1]
    assert "differ" not in report(old)[1]


def test_files_of_one_name_are_named_with_their_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [write_run(tmp_path / name / "run.jsonl", [record(1)]) for name in ("a", "b")]
    assert [run["name"] for run in json.loads(report(*paths, "--json")[1])["runs"]] == ["a/run", "b/run"]


def test_runs_have_their_own_names_and_parts_of_the_step_are_marked(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # the name of the folder is long
    path = write_run(tmp_path / "x_nan ms per step.jsonl", [record(1)])
    code, stdout, _ = report(path, path)
    assert code == 0
    assert "x_nan ms per step (1)" in stdout
    labels = [line.split("  ")[0] for line in stdout.splitlines()]
    step = labels.index("ms per step, median")
    assert labels[step + 1 : step + 4] == ["- forward", "- backward", "- exposed communication"]


def test_a_file_that_is_no_run_is_an_error_without_a_traceback(tmp_path):
    code, stdout, stderr = report(tmp_path / "none.jsonl")
    assert (code, stdout) == (1, "")
    assert stderr.startswith(f"Error: {tmp_path / 'none.jsonl'} cannot be read")
    assert "No such file" in stderr


def test_a_file_of_something_else_has_one_warning(tmp_path):
    """A file of something else has one warning and not one per line."""
    path = tmp_path / "some.log"
    path.write_text("[]\nnothing\n" * 500)
    code, _, stderr = report(path)
    assert code == 1
    warning, error = stderr.splitlines()
    assert warning == f"{path}, from line 1: 1,000 lines are skipped: cut, or not written by RunReport"
    assert error.startswith(f"Error: {path} has no header of a RunReport")
    assert "on_train_begin" in error
