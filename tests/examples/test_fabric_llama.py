"""`examples/fabric_llama.py` trains, saves, loads and generates, in processes that Lightning starts."""

import re
import sys
from pathlib import Path

import pytest

from tests.processes.launch import ROOT, torchrun

pytest.importorskip("lightning")
pytest.importorskip("transformers")


def test_it_has_at_most_120_lines():
    assert len((ROOT / "examples" / "fabric_llama.py").read_text().splitlines()) <= 120


@pytest.mark.slow
def test_it_trains_on_two_ranks_under_torchrun(tmp_path):
    arguments = ["--accelerator", "cpu", "--out", tmp_path / "checkpoint"]
    output = torchrun(ROOT / "examples" / "fabric_llama.py", *arguments)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert "generated" in output


@pytest.mark.slow
def test_lightning_starts_the_ranks_of_a_script_itself(tmp_path):
    import os
    import subprocess

    script = Path(ROOT / "examples" / "fabric_llama.py")
    result = subprocess.run(
        [sys.executable, script, "--accelerator", "cpu", "--steps", "2", "--out", tmp_path / "checkpoint"],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step 2: loss") == 1
