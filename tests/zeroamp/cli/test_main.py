"""`zeroamp` and `python -m zeroamp`, as processes where a process is what is tested."""

import pkgutil
import runpy
import subprocess
import sys
import tomllib

import pytest

from tests.processes.cli import run
from tests.processes.launch import ROOT, completed, environment
from tests.selection import slow_but
from zeroamp.__main__ import main


def test_the_entry_point_is_the_one_of_python_m():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert [pkgutil.resolve_name(name) for name in scripts.values()] == [main]


def test_python_m_exits_with_1_for_a_mistake(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zeroamp", "check", "none.json"])
    monkeypatch.delitem(sys.modules, "zeroamp.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("zeroamp", run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (1, "")
    assert err.startswith("Error: config")


def test_the_help_does_not_load_torch():
    helped = "from zeroamp.cli.app import parsers; [parser.format_help() for parser in parsers()]"
    assert completed("-c", f"import sys; {helped}; print('torch' in sys.modules)").stdout == "False\n"


NAMES = """
from torch import nn

def make():
    inner = nn.ModuleDict({"\\x1b[31m\\u202e": nn.Linear(8, 8), "\\x9b2J": nn.LayerNorm(8)})
    return nn.Sequential(inner, nn.Linear(8, 8))
"""
COMMANDS = {
    "check": ["check", "cfg.json", "--model", "names:make"],
    "explain": ["explain", "cfg.json", "--model", "names:make", "--per-parameter"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_name_of_a_module_reaches_the_terminal_as_an_escape(tmp_path, monkeypatch, python_file, command):
    python_file("names.py", NAMES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cfg.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    code, out, err = run(*command)
    assert code == 0, err
    assert out.replace("\n", "").isprintable()


OUTPUTS = {
    "reader has gone": ("| true", 141, ""),
    "closed": (">&-", 0, ""),
    "full": ("> /dev/full", 1, "Error: stdout cannot be written: No space left on device.\n"),
}


@pytest.mark.parametrize("case", slow_but(OUTPUTS, "reader has gone"))
def test_a_stdout_that_cannot_be_written_is_no_traceback(case):
    redirected, code, message = OUTPUTS[case]
    line = f"set -o pipefail; {{ sleep 0.2; PYTHONUNBUFFERED= {sys.executable} -m zeroamp check --all; }} {redirected}"
    done = subprocess.run(
        ["bash", "-c", line], check=False, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment()
    )
    assert (done.returncode, done.stderr, done.stdout) == (code, message, "")
