"""A small portion of the fault campaign: every kind of fault that can be made here, once."""

import json

import pytest

from tests.processes.launch import module


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_fault_loses_saved_work_or_a_bit_of_what_comes_after(tmp_path):
    arguments = ("--kills", 7, "--others", 1, "--timeout-s", 8, "--seed", 1, "--out", tmp_path)
    module("benchmarks.fault_campaign", *arguments, timeout_s=1150)
    record = json.loads((tmp_path / "faults.json").read_text())
    assert record["num_losses"] == 0
    assert record["num_kills"] >= 7
    tried = {attempt["kind"] for attempt in record["attempts"]}
    phases = ("load", "forward", "backward", "step", "save", "publish")
    assert {f"kill -9 in {phase}" for phase in phases} | {"kill -9 at any time", "kill -9 in export"} <= tried
    assert len(tried) + len(record["skipped"]) == 23
