"""`benchmarks/host_time.py` on a small model: equal work beside FSDP2, and how much Python zeroamp adds to a unit.

Calls of functions do not depend on the machine. No time is asserted.
"""

import json
import sys

import pytest

from benchmarks import host_time
from benchmarks.fake_ranks import fake_ranks

FEW, MORE = 2, 4  # layers
MODES = tuple(host_time.CONFIGS)


@pytest.mark.slow
def test_a_record_has_every_round_and_a_row_per_engine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["host_time", "--layers", str(FEW), "--rounds", "3", "--out", str(tmp_path)])
    monkeypatch.setattr(host_time, "WARM_UP", 1)
    host_time.main()  # checks that all engines have equally many groups, all-gathers and reductions
    text, seconds = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "rounds.json").read_text())["seconds"]
    assert text.split("\n\n", 1)[1].strip() == capsys.readouterr().out.strip()
    assert list(seconds) == [
        name for mode in MODES for name in (f"FSDP2 {mode}", f"FSDP2 {mode} again", f"zeroamp {mode}")
    ]
    assert all(len(rounds) == 3 for passes in seconds.values() for rounds in passes.values())
    assert "1.000 (1.000 to 1.000)" in text


def _ours_per_unit(mode):
    """Return pass -> calls of zeroamp's Python functions that one more unit adds."""
    counts = []
    for layers in (FEW, MORE):
        engine = host_time.of_zeroamp(layers, mode)
        engine.backward(engine.forward())
        engine.end()
        found = host_time.calls_of(engine)
        counts.append({name: sum(n for f, n in found[name].items() if host_time.is_ours(f)) for name in found})
    return {name: (counts[1][name] - counts[0][name]) / (MORE - FEW) for name in counts[0]}


def test_what_zeroamp_adds_to_a_unit():
    with fake_ranks(2):
        found = {mode: _ours_per_unit(mode) for mode in MODES}
        hooks = {mode: host_time.hooks_of_unit(host_time.of_zeroamp(FEW, mode)) for mode in MODES}
    # Two of FSDP2's. bf16 casts inputs, autocast guards the group of the norms. Under autocast, one hook
    # guards each of seven Linears.
    assert hooks == {"bf16": (3, 0), "autocast": (3, 7)}
    most = {"bf16": {"forward": 31, "backward": 40}, "autocast": {"forward": 42, "backward": 40}}
    assert all(found[mode][which] <= most[mode][which] for mode in MODES for which in host_time.PASSES), found
