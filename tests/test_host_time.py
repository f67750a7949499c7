"""`benchmarks/host_time.py` on a small model: how much Python zeroamp adds to a unit.

Calls of functions do not depend on the machine. No time is asserted.
"""

from benchmarks import host_time
from benchmarks.fake_ranks import fake_ranks

FEW, MORE = 2, 4  # layers
MODES = tuple(host_time.CONFIGS)


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
    # Two of FSDP2's, and the end of loans. bf16 casts inputs, autocast guards the group of the norms. Under autocast,
    # one hook guards each of seven Linears.
    assert hooks == {"bf16": (4, 0), "autocast": (4, 7)}
    most = {"bf16": {"forward": 31, "backward": 40}, "autocast": {"forward": 42, "backward": 40}}
    assert all(found[mode][which] <= most[mode][which] for mode in MODES for which in host_time.PASSES), found
