"""Optimizers that were built, and may have stepped, before the model was wrapped."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from zeroamp.optimizers.parameters_before import ParametersBefore


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


def _carried():
    expected, oracle = _stepped()
    model, optimizer = _stepped()
    before = ParametersBefore(model)
    zeroamp.wrap_model(model, zeroamp.policy_from_config({"zero_optimization": {"stage": 3}}))
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


def test_state_is_sharded_as_its_parameter_and_step_counts_stay(ranks2):
    ranks2.run(_carried)
