"""Planned and counted traffic in a form that compares."""

import torch

import zeroamp
from tests.models.small import loss_of
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.planning.mesh import ranks_of
from zeroamp.wrapping.state import wrap_state


def traffic_rows(traffic):
    """Return {(collective, dtype, group): (calls, bytes)} as text and numbers."""
    assert traffic.calls.keys() == traffic.num_bytes.keys()
    return {tuple(map(str, key)): (calls, traffic.num_bytes[key]) for key, calls in traffic.calls.items()}


def planned_and_counted(model, inputs):
    """Return `traffic_rows` as planned, and as counted in the last of two steps on the inputs."""
    state = wrap_state(model)
    planned = traffic_rows(plan_traffic(state.plan, ranks_of(state.mesh)))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(2):  # the first and the later ones cost the same
        state.traffic.reset()
        for _ in range(state.plan.policy.gradient_accumulation_steps):
            step.backward(loss_of(model, inputs))
            step.step()
        counted = traffic_rows(state.traffic)
        if counted != planned:
            break
    return planned, counted
