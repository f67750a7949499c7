"""`create_graph=True` raises before FSDP2 has freed anything."""

import pytest
import torch
from torch import nn

import zeroamp
from tests.processes.training import config


class Critic(nn.Module):
    """Units in a row; the last layer belongs to the root. With `inside`, the forward differentiates itself."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 1, bias=False)

    def forward(self, x):
        h = x
        for block in self.blocks:
            h = block(h)
        energy = self.head(h.tanh())
        if self.inside:
            torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy


def penalty_of_inputs(model, x):
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def penalty_of_parameters(model, x):
    torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)


def graph_of_all_gradients(model, x):
    model(x).sum().backward(create_graph=True)


def forces_in_the_forward(model, x):
    model(x)


def first_derivative_of_torch_func(model, x):
    torch.func.grad(lambda inputs: model(inputs).sum())(x.detach())


LOSSES = [
    penalty_of_inputs, penalty_of_parameters, graph_of_all_gradients, forces_in_the_forward,
    first_derivative_of_torch_func,
]  # fmt: skip


def _refused(stage, loss):
    is_inside = loss is forces_in_the_forward
    policy = zeroamp.policy_from_config(config(stage))
    model = zeroamp.wrap_model(Critic(is_inside), policy, auto_wrap_policy={"Sequential"})
    x = torch.ones(4, 8, requires_grad=True)
    says = r"create_graph=True.*torch\.autograd\.grad\(loss, inputs\).*DistributedDataParallel"
    with pytest.raises(zeroamp.StepError, match=says):
        loss(model, x)
    if is_inside:
        return  # an error inside of a forward ends the training
    model(x).square().mean().backward()  # nothing had begun: training goes on
    assert all(parameter.grad.full_tensor().any() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_derivative_is_refused(ranks2, stage, loss):
    ranks2.run(_refused, stage, loss)
