"""The tour runs from its beginning to its end on one process, twice in the same folder."""

import os
import subprocess
import sys

import pytest

from tests.processes.launch import ROOT


@pytest.mark.slow
def test_the_tour_runs_twice(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(2):
        command = [sys.executable, str(ROOT / "examples" / "tour.py")]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "every dtype is the expected one" in done.stdout
        assert (tmp_path / "runs" / "tour" / "run.jsonl").read_text().count('"kind": "step"') == 10
