"""When a `RunReport` may begin, what is beside it, and what ends it."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, wrapped
from tests.zeroamp.reporting.runs import NAME, take_steps, train_step
from zeroamp.hooks._torch.fsdp import communication_methods
from zeroamp.reporting.step_recorder import StepRecorder

DOCS = Path(__file__).parents[3] / "docs" / "instruments.md"


def _two_reports(folder):
    """Of two TrainSteps on one model; the one that came first is closed first."""
    model = wrapped(NAME, config(3))
    before = _methods(model)
    trains = [zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-2)) for _ in range(2)]
    runs = [zeroamp.RunReport(train, f"{folder}/{index}.jsonl") for index, train in enumerate(trains)]
    take_steps(trains[1], 2)
    runs[0].close()
    take_steps(trains[1], 1)
    exposed_s = runs[1].last.exposed_communication_s
    runs[1].close()
    return exposed_s > 0, _methods(model) == before


def _methods(model):
    return [vars(owner).get(name) for owner, name in communication_methods(model)]


def test_a_report_that_is_closed_leaves_another_on_the_same_model_alone(ranks2, tmp_path):
    assert ranks2.run(_two_reports, str(tmp_path)) == [(True, True)] * 2


def _one_at_a_time(folder):
    """What the second of two reports is answered, and what a monitor has before, with and after the first."""
    train = train_step(config(3, csv_monitor={"enabled": True, "output_path": folder}))
    take_steps(train, 1)
    run = zeroamp.RunReport(train, f"{folder}/a.jsonl", tokens_per_step=7, flops_per_step=1e9, peak_flops=1e12)
    with pytest.raises(zeroamp.StepError) as refused:
        zeroamp.RunReport(train, f"{folder}/b.jsonl")
    take_steps(train, 1)
    run.close()
    with zeroamp.RunReport(train, f"{folder}/b.jsonl") as other:
        run.close()  # again, which ends no other
        take_steps(train, 1)
    take_steps(train, 1)
    return str(refused.value), run.last.mfu, (other.last.step, other.last.num_tokens, other.last.mfu)


def test_a_train_step_has_one_report_at_a_time_whose_figures_monitors_have_while_it_is_open(ranks2, tmp_path):
    num_tokens = batch(NAME, 0).numel() * 2
    (text, mfu, last), (other_text, _, other_last) = ranks2.run(_one_at_a_time, str(tmp_path))
    assert text == other_text
    assert "Another RunReport is open on this TrainStep" in text
    assert "Close the other one" in text
    assert last == other_last == (3, num_tokens, None)
    assert [record.step for record in zeroamp.read_run(tmp_path / "a.jsonl").records] == [2]
    with (tmp_path / "zeroamp" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["num_tokens"] for row in rows] == [str(num_tokens), "7", str(num_tokens), str(num_tokens)]
    assert [row["mfu"] for row in rows] == ["", str(mfu), "", ""]


def _inside_a_window(path):
    """Begin a report at every moment of a window of two micro-batches, and after a window that was given up."""
    train = train_step(config(3, accumulation=2))
    refused = []

    def begin():
        try:
            zeroamp.RunReport(train, path).close()
        except zeroamp.StepError as error:
            refused.append("Construct it after step()" in str(error))
        else:
            refused.append(None)

    for act in (lambda: None, lambda: train.backward(loss_of(train.model, batch(NAME, 0))), train.step):
        act()
        begin()
    train.zero_grad()
    begin()
    take_steps(train, 1)
    begin()
    return refused


def test_a_report_that_would_begin_inside_a_window_is_refused(ranks2, tmp_path):
    assert ranks2.run(_inside_a_window, str(tmp_path / "run.jsonl")) == [[None, True, True, None, None]] * 2


def _on_a_full_disk():
    """/dev/full opens, and no write to it succeeds."""
    train = train_step(config(3))
    with log_lines() as lines, zeroamp.RunReport(train, "/dev/full") as run:
        take_steps(train, 2)
    return run.last.step, [line for line in lines if "is written" in line]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_line_that_cannot_be_written_ends_the_file_and_not_the_training(ranks2):
    (last, lines), others = ranks2.run(_on_a_full_disk)
    assert [line.partition(", because")[0] for line in lines] == ["JsonlWriter: nothing is written from step 1 on"]
    assert (last, others) == (2, (2, []))


def _documented(code, folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        names = {"zeroamp": zeroamp, "torch": torch, "dist": dist, "model": build(NAME), "loader": [batch(NAME, 0)]}
        exec(code, names)
    finally:
        os.chdir(before)
    take_steps(names["train"], 1)  # after the end of the `with`
    return [callback for callback in names["train"].callbacks if isinstance(callback, StepRecorder)]


def test_the_example_of_the_docs_runs(ranks2, tmp_path):
    reports = DOCS.read_text().partition("## Reports")[2]
    code = reports.partition('```python title="fragment"\n')[2].partition("```")[0]
    (tmp_path / "config.json").write_text(json.dumps(config(3)))
    assert ranks2.run(_documented, code, str(tmp_path)) == [[], []]
    assert (tmp_path / "runs" / "a.jsonl").is_file()
