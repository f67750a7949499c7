"""The README's quick start is `examples/minimal.py`, and it runs."""

import re

from tests.processes.launch import ROOT, torchrun


def test_the_quick_start_of_the_readme_is_the_example_verbatim():
    assert f"```python\n{(ROOT / 'examples' / 'minimal.py').read_text()}```" in (ROOT / "README.md").read_text()


def test_it_has_at_most_40_lines():
    assert len((ROOT / "examples" / "minimal.py").read_text().splitlines()) <= 40


def test_it_trains_on_two_ranks_and_prints_the_ledger():
    output = torchrun("examples/minimal.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert "model-wide:fp32" in output
