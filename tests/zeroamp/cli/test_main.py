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


TYPOS = [
    ("chekc", "zero.json"),
    ("check", "zreo.json"),
    ("check", "zero.json", "--wrold-size", "8"),
    ("check", "typo.json"),
    ("check", "dtype.json"),
    ("check", "optimizer.json"),
    ("check", "scheduler.json"),
    ("explain", "typo.json", "--model", "giant:build"),
    ("plan", "typo.json", "--model", "giant:build", "--world-size", "8"),
    ("check", "zero.json", "--auto", "lr=1e-4"),
    ("explain", "zero.json", "--model", "no/such/folder"),
    ("plan", "zero.json", "--model", "no_such.py:build", "--world-size", "8"),
    ("plan", "zero.json", "--model", "giant:build", "--world-size", "8", "--gpu", "h1000"),
    ("plan", "zero.json", "--model", "giant:build", "--world-size", "8", "--stages", "4"),
    ("report", "no_such.jsonl"),
    ("--help",),
]


def test_a_typo_ends_with_its_exit_code(tmp_path):
    cfg = config(3) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    (tmp_path / "zero.json").write_text(json.dumps(cfg))
    (tmp_path / "typo.json").write_text(json.dumps(cfg | {"zeroamp": {"compoil": True}}))
    for block, name in (("optimizer", "Adamm"), ("scheduler", "StepLR")):
        (tmp_path / f"{block}.json").write_text(json.dumps(cfg | {block: {"type": name}}))
    (tmp_path / "dtype.json").write_text(json.dumps(cfg | {"communication_data_type": "bf61"}))
    script = f"""
import sys
from zeroamp.__main__ import main

for arguments in {TYPOS!r}:
    sys.argv = ["zeroamp", *arguments]
    try:
        main()
    except SystemExit as ended:
        print(f"exit code {{ended.code}}", file=sys.stderr)
"""
    done = python("-c", script, cwd=tmp_path)
    codes = [int(line.split()[-1]) for line in done.stderr.splitlines() if line.startswith("exit code ")]
    assert codes == [2, 1, 2, *[1] * 10, 2, 1, 0], done.stderr
