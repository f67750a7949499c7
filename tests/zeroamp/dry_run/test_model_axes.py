"""What the dry run says of a rank of a tensor or expert axis is what real training on four ranks shows."""

import pytest

from tests.measuring.measured import measured_on_axes
from tests.selection import slow_but

STATISTICS = 256
"""Bytes of the numbers of the step's all-reduce that live past it, which are not predicted."""

CASES = [
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"sequence": True}),
    ({"dp": 2, "tp": 2}, {"tied": True}),
    ({"dp": 2, "ep": 2}, {"experts": True}),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0], CASES[3]), ids=str)
def test_a_rank_holds_and_moves_what_is_planned(ranks4, case):
    axes, parts = case
    for stage, checkpointing in ((1, False), (3, True)):
        for found, predicted in ranks4.run(measured_on_axes, axes, {"stage": stage}, checkpointing, **parts):
            assert predicted["traffic"] == found["traffic"]
            for kind in ("parameters", "gradients", "optimizer state"):
                assert predicted[kind] == found[kind], kind
            assert abs(found["peak"] - predicted["peak"]) <= STATISTICS
