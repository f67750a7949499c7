"""What the page of a plan draws: its stretches are those of the step, in order."""

import numpy as np
import pytest

from tests.zeroamp.dry_run.plans import plan
from zeroamp.dry_run.drawn_timeline import stretches
from zeroamp.dry_run.timeline import PHASES

ONE = ["forward", "backward"]


def planned(accumulation=1):
    return plan({"accumulation": accumulation}, stages=(3,))


@pytest.mark.parametrize(
    ("accumulation", "names"),
    [
        pytest.param(1, [""], marks=pytest.mark.slow),
        pytest.param(2, ["first micro-batch", "last micro-batch"], marks=pytest.mark.slow),
        (4, ["first micro-batch", "middle micro-batch", "last micro-batch"]),
    ],
)
def test_all_events_of_the_step_are_in_stretches_in_the_order_in_which_they_happen(accumulation, names):
    memory = planned(accumulation).stages[0].memory
    found = stretches(memory)
    assert [stretch.phase for stretch in found] == [*ONE * len(names), "optimizer"]
    assert [stretch.micro_batch for stretch in found[:-1:2]] == names
    assert {stretch.micro_batch for stretch in (*found[1::2], found[-1])} == {""}
    events = np.concatenate([stretch.events for stretch in found])
    assert np.array_equal(events, np.flatnonzero(memory.phases != PHASES.index("init")))
    assert np.array_equal(events, np.arange(events[0], len(memory.phases)))
