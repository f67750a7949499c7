"""A portion of the campaign of crafted files: each is read in a process of its own, whose memory is measured."""

import json

import pytest

from tests.processes.launch import module


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_crafted_file_is_accepted_run_or_given_memory(tmp_path):
    module("benchmarks.crafted_files", "--every", 9, "--out", tmp_path, timeout_s=580)
    endings = [json.loads(line) for line in (tmp_path / "crafted_files.jsonl").read_text().splitlines()]
    assert len(endings) > 60
    assert {ending["reader"] for ending in endings} >= {
        "load_checkpoint", "export_checkpoint", "latest_checkpoint", "load_hf",
        "read_run", "policy_from_config",
    }  # fmt: skip
    assert [ending for ending in endings if not ending["is_right"]] == []
