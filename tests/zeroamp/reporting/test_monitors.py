"""The config's monitors: what they wrote is read back."""

import csv
import gc
import sys
import weakref

import pytest
import torch

import zeroamp
from tests.measuring.logs import log_lines
from tests.processes.ranks import RankError
from tests.processes.training import config, wrapped
from tests.zeroamp.reporting.records import record
from tests.zeroamp.reporting.runs import NAME, take_steps, train_step
from zeroamp.policies.schema.config import FileMonitorBlock, WandbBlock
from zeroamp.reporting.exposed_communication import watch_of
from zeroamp.reporting.monitors import CsvWriter, TensorBoardWriter, WandbWriter, breakdown


def _monitored(folder, num_starts):
    for _ in range(num_starts):
        train = train_step(config(3, csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"}))
        reports = take_steps(train, 3)
    return [report.loss for report in reports]


def test_csv_has_a_row_per_step_and_a_second_start_appends(ranks2, tmp_path):
    losses, _ = ranks2.run(_monitored, str(tmp_path), 2)
    with (tmp_path / "job" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 1, 2, 3]
    assert [float(row["loss"]) for row in rows] == losses * 2
    assert [float(row["lr"]) for row in rows[:3]] == [1e-2, 5e-3, 2.5e-3]
    assert float(rows[0]["traffic_bytes"]) > 0
    assert rows[0]["mfu"] == ""


@pytest.mark.parametrize("num_cut", [1, 20])
def test_csv_that_a_crash_cut_gets_whole_rows_after_the_cut_one(tmp_path, num_cut):
    def write(*numbers):
        writer = CsvWriter(FileMonitorBlock(enabled=True, output_path=str(tmp_path), job_name="job"))
        for number in numbers:
            writer.step(record(number))
        writer.close()
        return path.read_text()

    path = tmp_path / "job" / "steps.csv"
    cut = write(1, 2)[:-num_cut]
    path.write_text(cut)
    text = write(2, 3)
    assert text.startswith(f"{cut}\n")
    assert [row["step"] for row in csv.DictReader(text.splitlines())] == ["1", "2", "2", "3"]
    assert [len(line.split(",")) for line in text.splitlines()[-2:]] == [len(CsvWriter.COLUMNS)] * 2
    assert write() == text


def test_csv_with_other_columns_is_not_appended_to(tmp_path):
    (tmp_path / "zeroamp").mkdir()
    (tmp_path / "zeroamp" / "steps.csv").write_text("step,colour\n")
    with pytest.raises(zeroamp.ConfigError, match=r"csv_monitor\.output_path.* other columns.* Move"):
        CsvWriter(FileMonitorBlock(enabled=True, output_path=str(tmp_path)))


def test_tensorboard_has_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(FileMonitorBlock(enabled=True, output_path=str(tmp_path), job_name="job"))
    writer.step(record(1, loss=3.0, traffic_bytes={"all_gather bf16": 8}))
    writer.step(record(2, loss=2.5))
    writer.close()
    events = EventAccumulator(str(tmp_path / "job")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 3.0), (2, 2.5)]
    assert events.Scalars("train/traffic_bytes/all_gather_bf16")[0].value == 8
    assert set(record().scalars()) <= {tag.removeprefix("train/") for tag in events.Tags()["scalars"]}


def test_wandb_gets_every_step_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = WandbWriter(WandbBlock(enabled=True, project="p"), {"zero_optimization": {"stage": 3}})
    for number, loss in ((1, 4.0), (1, 3.5), (2, 3.0)):  # of which the second was skipped
        writer.step(record(number, loss=loss))
    assert (writer._run.summary["train/loss"], writer._run.summary["step"], writer._run.step) == (3.0, 2, 3)
    assert writer._run.config["zero_optimization"] == {"stage": 3}
    writer.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def _without(block):
    for name in ("tensorboard", "torch.utils.tensorboard", "wandb"):
        sys.modules[name] = None
    try:
        train_step(config(3, **{block: {"enabled": True}}))
    finally:
        for name in ("tensorboard", "torch.utils.tensorboard", "wandb"):
            del sys.modules[name]


@pytest.mark.parametrize("block", ["tensorboard", "wandb"])
def test_a_monitor_whose_package_is_missing_is_an_error_on_all_ranks(ranks2, block):
    with pytest.raises(RankError) as caught:
        ranks2.run(_without, block)
    assert str(caught.value).count(f"ConfigError: rank 0: {block}.enabled needs") == 2
    assert f"pip install 'zeroamp[{block}]'" in str(caught.value)


def _broken_down(cfg):
    with log_lines(20) as lines:
        train = train_step(cfg)
        take_steps(train, 4)
    return [line for line in lines if "exposed communication" in line]


def test_the_breakdown_is_logged_at_steps_per_print_on_the_first_rank(ranks2):
    first, second = ranks2.run(_broken_down, config(2, wall_clock_breakdown=True, steps_per_print=2))
    assert [line.split(":")[0] for line in first] == ["step 2", "step 4"]
    for part in ("forward", "backward", "exposed communication", "optimizer", "other"):
        assert f"{part} " in first[0]
    assert second == []


def _dropped(folder):
    """What watches a model after each of two TrainSteps on it was dropped, with all that they can have."""
    model = wrapped(NAME, config(3, csv_monitor={"enabled": True, "output_path": folder}, wall_clock_breakdown=True))
    state = model._zeroamp_state
    counts = []
    for _ in range(2):
        train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        run = zeroamp.RunReport(train, f"{folder}/run.jsonl")
        take_steps(train, 2)
        recorder = weakref.ref(train.callbacks[0])
        del train
        gc.collect()
        counts.append((len(state.listeners) - 2, len(watch_of(model)._listeners), run.last.step))
        del run
        gc.collect()
        counts.append(recorder() is None)
    return counts


def test_a_train_step_that_is_dropped_closes_its_files_and_leaves_nothing_on_the_model(ranks2, tmp_path):
    assert ranks2.run(_dropped, str(tmp_path)) == [[(0, 0, 2), True] * 2] * 2
    run = zeroamp.read_run(tmp_path / "run.jsonl")
    assert (len(run.headers), [record.step for record in run.records]) == (2, [1, 2])  # the second began again
    with (tmp_path / "zeroamp" / "steps.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 1, 2]


def test_the_breakdown_leaves_out_skipped_steps_whose_number_is_that_of_the_one_before():
    log = breakdown(2)
    with log_lines(20) as lines:
        for number, skipped in ((0, True), (0, True), (1, False), (2, False), (2, True), (3, False), (4, False)):
            log(record(number, skipped=skipped))
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]


def _watchers(cfg):
    return len(train_step(cfg).callbacks)


def test_nothing_watches_where_the_config_asks_for_nothing(ranks2):
    assert ranks2.run(_watchers, config(3)) == [0, 0]


def test_a_verification_starts_no_monitor(ranks2, tmp_path):
    assert ranks2.run(_verified, str(tmp_path)) == [True, True]
    assert not (tmp_path / "zeroamp").exists()


def _verified(folder):
    from tests.models.small import batch

    model = wrapped("llama_tied", config(3, csv_monitor={"enabled": True, "output_path": folder}))
    return bool(zeroamp.explain(model).verify(model, batch("llama_tied", 0)))


def test_the_config_of_a_policy_with_monitors_makes_an_equal_policy():
    cfg = {
        "tensorboard": {"enabled": True, "output_path": "a", "job_name": "b"},
        "csv_monitor": {"enabled": True},
        "wandb": {"enabled": True, "team": "t"},
        "wall_clock_breakdown": True,
    }
    policy = zeroamp.policy_from_config(cfg)
    assert policy.tensorboard.output_path == "a"
    assert zeroamp.policy_from_config(policy.to_config()) == policy
    off = zeroamp.policy_from_config({"tensorboard": {"output_path": "a"}})
    assert off.tensorboard is None
    assert "tensorboard is not enabled" in off.report()
