"""Linears that read one tensor have the bits of one process, also if the tensor is written to or is a dual tensor."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import zeroamp
from tests.processes.training import config

# Of `torch.func`, the first time that it needs a decomposition.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WIDTH = 64


class Attention(nn.Module):
    """Three Linears that read one tensor, then a fourth one.

    Without biases: vmap adds them outside of the Linear's own op, where autocast casts nothing.
    """

    def __init__(self, between=lambda x: None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.between = between

    def forward(self, x):
        y = self.norm(x)
        q = self.q(y)
        self.between(y)
        return self.out(torch.tanh(q) * torch.sigmoid(self.k(y)) + self.v(y))


class Model(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.layers = nn.ModuleList(Attention(between) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def scale_data(y):
    y.data.mul_(2)


def loss_of_data(model, x):
    return model(x).float().square().mean()


def loss_of_jvp(model, x):
    output, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return output.float().square().mean() + functional.relu(tangent.float()).mean()


def loss_of_vmap(model, x):
    return torch.func.vmap(model)(x).float().square().mean()


CASES = {
    "a write through .data": (scale_data, loss_of_data),
    "jvp": (lambda y: None, loss_of_jvp),
    "vmap": (lambda y: None, loss_of_vmap),
}


def _run(case, stage):
    """Return (loss, gradients) of one batch that all ranks have; at stage None of one process."""
    between, loss_of = CASES[case]
    torch.manual_seed(0)
    model = Model(between)
    x = torch.randn(8, WIDTH)
    if stage is None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x)
        loss.backward()
        return loss.item(), {fqn: parameter.grad for fqn, parameter in model.named_parameters()}
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(stage)), auto_wrap_policy={"Attention"})
    loss = loss_of(model, x)
    loss.backward()
    return loss.item(), {fqn: parameter.grad.full_tensor() for fqn, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_one_process(ranks2, case, stage):
    loss, gradients = _run(case, None)
    for found, found_gradients in ranks2.run(_run, case, stage):
        assert found == loss
        assert [fqn for fqn in gradients if not torch.equal(found_gradients[fqn], gradients[fqn])] == []
