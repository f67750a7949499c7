"""Optimizers that were built, and may have stepped, before the model was wrapped."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from zeroamp.optimizers.parameters_before import ParametersBefore
from zeroamp.policies.errors import StepError


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.ones(1))  # one element: its state has one too, as the step count has

    def forward(self, x):
        return self.proj(x) * self.gain


def _stepped():
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _policy(stage):
    return zeroamp.policy_from_config({"train_batch_size": 2, "zero_optimization": {"stage": stage}}, world_size=2)


def _carried(stage):
    expected, oracle = _stepped()
    model, optimizer = _stepped()
    before = ParametersBefore(model)
    zeroamp.wrap_model(model, _policy(stage))
    before.wrapped(model)
    before.repoint([optimizer])
    zeroamp.TrainStep(model, optimizer)
    groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert groups == list(model.parameters())
    for old, new in zip(expected.parameters(), model.parameters(), strict=True):
        for key, value in oracle.state[old].items():
            found = optimizer.state[new][key]
            assert isinstance(found, DTensor) == (key != "step"), key
            assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, value), key
    return True


@pytest.mark.parametrize("stage", [0, 3])
def test_state_is_sharded_as_its_parameter_and_step_counts_stay(ranks2, stage):
    assert ranks2.run(_carried, stage) == [True, True]


def _other_shape():
    model, optimizer = _stepped()
    optimizer.state[model.proj.weight]["exp_avg"] = torch.zeros(2)
    before = ParametersBefore(model)
    zeroamp.wrap_model(model, _policy(3))
    before.wrapped(model)
    before.repoint([optimizer])
    with pytest.raises(StepError, match=r'state "exp_avg" of proj.weight as a plain tensor of shape \(2,\)'):
        zeroamp.TrainStep(model, optimizer)
    return True


def test_state_of_another_shape_is_refused(ranks2):
    assert ranks2.run(_other_shape) == [True, True]
