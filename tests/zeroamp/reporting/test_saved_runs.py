"""What is read of a run that went back to a checkpoint, or began again: every step once."""

import json
import os
import random

import pytest
import torch

import zeroamp
from tests.processes.training import config, wrapped
from tests.zeroamp.reporting.records import record, write_run
from tests.zeroamp.reporting.runs import NAME, take_steps
from zeroamp.reporting.saved_runs import runs_to_dict, table

OVERFLOWING = config(3, dtype="float16", fp16={"initial_scale_power": 20, "hysteresis": 1})


def walk(seed, counts_skipped):
    """The records of a run that goes back now and then, in the order of the file, and those that were not lost."""
    choose = random.Random(seed)
    file, path = [], []
    while len(file) < 60:
        if choose.random() < 0.1:
            del path[choose.randint(0, len(path)) :]
        for _ in range(choose.randint(1, 3)):
            skipped = choose.random() < 0.5 and counts_skipped
            num_skipped = sum(each.skipped for each in path) + skipped
            step = len(path) + 1 - num_skipped
            fields = {"skipped": skipped, "num_skipped": num_skipped if counts_skipped else None}
            file.append(record(step, loss=float(len(file)), **fields))
            path.append(file[-1])
    return file, path


@pytest.mark.parametrize("counts_skipped", [True, False])
def test_steps_that_were_lost_are_left_out(tmp_path, counts_skipped):
    for seed in range(30):
        file, path = walk(seed, counts_skipped)
        assert zeroamp.read_run(write_run(tmp_path / "run.jsonl", file)).records == path


def _started_twice(path):
    for _ in range(2):
        model = wrapped(NAME, OVERFLOWING)
        train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        with zeroamp.RunReport(train, path):
            reports = take_steps(train, 6)
    return [report.skipped for report in reports], train.num_skipped


def test_a_run_that_began_again_skipped_its_steps_once(ranks2, tmp_path):
    path = tmp_path / "run.jsonl"
    skipped, num_skipped = ranks2.run(_started_twice, str(path))[0]
    assert skipped[:2] == [True, True]
    run = zeroamp.read_run(path)
    assert [each.skipped for each in run.records] == skipped
    assert run.records[-1].num_skipped == num_skipped
    assert len(run.headers) == 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_only_a_regular_file_is_read(tmp_path, kind):
    path = tmp_path / "run.jsonl"
    {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    with pytest.raises(zeroamp.CheckpointError, match="not a regular file"):
        zeroamp.read_run(path)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"kind":' * 100_000,
        json.dumps({**record(2).to_json(), "loss": 10**4000}),
        json.dumps({**record(2).to_json(), "traffic_bytes": {"all-gather": 10**4000}}),
        json.dumps({**record(2).to_json(), "lr": [[1]]}),
        "x" * 17 * 1024**2,
    ],
    ids=["lists", "objects", "loss", "bytes", "lr", "long"],
)
def test_a_line_that_no_run_wrote_is_left_out(tmp_path, line):
    path = write_run(tmp_path / "run.jsonl", [record(1)])
    path.write_text(f"{path.read_text()}{line}\n{json.dumps(record(2).to_json())}\n")
    run = zeroamp.read_run(path)
    assert [each.step for each in run.records] == [1, 2]
    assert run.num_unreadable >= 1
    assert "loss, last" in table([run])


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
    path.write_text(path.read_text() + json.dumps({"kind": "warning", "name": "\x1b[2J", "text": ""}) + "\n")
    text = table([zeroamp.read_run(path)])
    assert "\x1b" not in text
    assert "\\x1b[2J" in text
