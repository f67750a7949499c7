"""The benchmarks beside the peers: what they count and write, on the tiny model. No time is asserted."""

import dataclasses
import importlib.util
import json
import re
from unittest import mock

import pytest
import torch

from benchmarks import shared_runs, step_time
from benchmarks.peers.engines import DEFAULT_ENGINES
from benchmarks.peers.options import Options
from tests.processes.launch import ROOT, module

CPU = torch.device("cpu")
OPTIONS = Options(model="tiny", batch=2, length=16, rounds=2, warm_up=1)


def _without_deepspeed(measure, options):
    find = importlib.util.find_spec
    with mock.patch("importlib.util.find_spec", lambda name: None if name == "deepspeed" else find(name)):
        return measure(options, CPU)


def _measured_times(options):
    measured = _without_deepspeed(step_time.measure, options)
    step_time.time_rows(measured, "seconds", ["FSDP2 bf16 reshard"], options, CPU)
    step_time.traffic_rows(measured)
    return measured


def test_engines_of_the_same_numerics_train_to_the_same_loss(ranks2):
    options = dataclasses.replace(OPTIONS, engines=(*DEFAULT_ENGINES, "zeroamp 3 plain loop"))
    losses = ranks2.run(_measured_times, options)[0]["losses"]
    zeroamp = [f"zeroamp {variant}" for variant in ("0", "1", "2", "3", "3 plain loop", "3 live")]
    same = [*zeroamp, "FSDP2 autocast reshard", "DDP autocast"]
    assert len({losses[name] for name in same}) == 1
    assert losses["FSDP2 bf16 reshard"] == losses["FSDP2 bf16 reshard again"] != losses["zeroamp 3"]


@pytest.mark.slow
def test_a_record_has_the_command_and_every_round(tmp_path):
    arguments = ("--model", "tiny", "--length", 16, "--rounds", 3, "--warm-up", 1, "--fake", "--world-size", 8)
    engines = ("--engines", "zeroamp 3,FSDP2 bf16 reshard,DDP autocast", "--out", tmp_path)
    module("benchmarks.step_time", *arguments, *engines, timeout_s=100)
    text, values = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "rounds.json").read_text())
    assert "python -m benchmarks.step_time --model tiny" in text
    assert "8 ranks on a process group that moves nothing" in text
    assert {name: len(mine) for name, mine in values["rounds"].items()} == {"zeroamp 3": 3, "FSDP2 bf16 reshard": 3}
    assert values["not run"] == {"DDP autocast": "not with a fake process group"}
    assert values["versions"]["torch"] == torch.__version__


def test_runs_that_processes_share_end_as_lines_of_one_file(tmp_path):
    run = {"model": "3.7m", "method": "autocast, bf16 ring", "seed": 0}
    path = shared_runs.claim(tmp_path / "curves", run)
    assert path.name == "3.7m-autocast-bf16-ring-0.json"
    assert shared_runs.claim(tmp_path / "curves", run) is None
    assert list(shared_runs.read(tmp_path / "curves")) == []
    shared_runs.write(path, run, {"losses": [1.5]})
    results = list(shared_runs.read(tmp_path / "curves"))
    assert results == [run | {"losses": [1.5]}]
    shared_runs.write_record(tmp_path / "record" / "curves.jsonl", results)
    assert list(shared_runs.read(tmp_path / "record" / "curves")) == results


def test_names_of_records_need_no_quotes_in_a_shell():
    names = [path.name for path in (ROOT / "benchmarks" / "records").rglob("*")]
    assert [name for name in names if not re.fullmatch(r"[\w.-]+", name)] == []
