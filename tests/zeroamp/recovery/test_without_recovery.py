"""Without `zeroamp.recovery` nothing of it runs; with it on, what it costs is there."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import zeroamp
from tests.processes.training import config, policy
from zeroamp.planning.mesh import ranks_of
from zeroamp.planning.traffic import plan_traffic
from zeroamp.recovery.buffer_snapshot import BufferSnapshot
from zeroamp.wrapping.state import wrap_state

NUM_STEPS = 2


@dataclass
class Attached:
    """What one `TrainStep` attached, and what its steps did."""

    listeners: int
    callbacks: int
    has_recovery: bool
    snapshots: int
    bytes_of_all_reduce: int
    planned_bytes: int


def _attached(recovery):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    cfg = config(3, zeroamp={"recovery": recovery})
    model = zeroamp.wrap_model(layers, policy(cfg), auto_wrap_policy={"Linear"})
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    taken, take = [], BufferSnapshot.take
    BufferSnapshot.take = lambda snapshot: (taken.append(snapshot), take(snapshot))
    try:
        for _ in range(NUM_STEPS):
            step.backward(model(torch.ones(2, 8)).sum())
            step.step()
    finally:
        BufferSnapshot.take = take
    num_bytes = zeroamp.traffic(model).num_bytes
    of_step = {key.collective: moved for key, moved in num_bytes.items() if key.group == "step"}
    assert of_step.keys() == {"all_reduce"}
    return Attached(
        listeners=len(wrap_state(model).listeners) - 2,  # beside the counters of traffic and what compares ranks
        callbacks=len(step.callbacks),
        has_recovery=step.recovery is not None,
        snapshots=len(taken),
        bytes_of_all_reduce=of_step["all_reduce"] // NUM_STEPS,
        planned_bytes=sum(moved for key, moved in _planned(model).num_bytes.items() if key.group == "step"),
    )


def _planned(model):
    state = wrap_state(model)
    return plan_traffic(state.plan, ranks_of(state.mesh))


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [
        (False, Attached(0, 0, False, 0, bytes_of_all_reduce=5 * 8, planned_bytes=5 * 8)),
        (True, Attached(1, 1, True, NUM_STEPS, bytes_of_all_reduce=6 * 8, planned_bytes=6 * 8)),
    ],
    ids=["off", "on"],
)
def test_nothing_listens_and_nothing_is_copied_or_sent_where_it_is_off(ranks2, recovery, expected):
    # The step's all-reduce in fp64: loss, sum of squares, two numbers for the use of six parameters, and a hash that
    # compares the ranks; with recovery, the number of ranks that failed.
    assert ranks2.run(_attached, recovery)[0] == expected
