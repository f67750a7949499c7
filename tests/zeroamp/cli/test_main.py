"""`zeroamp` and `python -m zeroamp` as processes."""

import pkgutil
import tomllib

from tests.processes.launch import ROOT, completed
from zeroamp.__main__ import main


def test_the_entry_point_is_the_one_of_python_m():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert [pkgutil.resolve_name(name) for name in scripts.values()] == [main]


def test_python_m_exits_with_1_for_a_mistake(tmp_path):
    done = completed("-m", "zeroamp", "check", "none.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: config")
    assert "Traceback" not in done.stderr
