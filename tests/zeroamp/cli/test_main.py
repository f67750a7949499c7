"""`zeroamp` and `python -m zeroamp` as processes, and what is imported when."""

import json
import os
import pkgutil
import subprocess
import sys
import tomllib

import pytest

from tests.processes.launch import ROOT
from tests.processes.training import config
from zeroamp.__main__ import main


def test_the_entry_point_is_the_one_of_python_m():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert [pkgutil.resolve_name(name) for name in scripts.values()] == [main]


def python(*arguments, cwd):
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # this checkout, wherever it runs
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_python_m_explains_a_model_that_no_machine_holds(python_file, tmp_path):
    python_file("zero.json", json.dumps(config(3)))
    python_file("giant.py", "from torch import nn\ndef build(): return nn.Sequential(nn.Linear(2**22, 2**22))")
    command = ("-m", "zeroamp", "explain", "zero.json", "--model", "giant:build", "--json")
    done = python(*command, cwd=tmp_path)  # 64 TiB in fp32
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"][0]["elements"] == 2**44
    assert done.stderr.startswith("Sequential has no units below its root")


def test_python_m_exits_with_1_for_a_mistake(tmp_path):
    done = python("-m", "zeroamp", "check", "none.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: config")
    assert "Traceback" not in done.stderr
