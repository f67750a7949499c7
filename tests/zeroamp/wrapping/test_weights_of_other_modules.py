"""Weights that other code reads or replaces, and weights that FSDP2 does not take: right, or one error by name."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zeroamp
from tests.processes.training import config, full_parameters, same_bits

NUM_STEPS = 2


class Attention(nn.Module):
    """Reads the weight of a Linear that it never calls: `out_proj` of `nn.MultiheadAttention`."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return self.lin(x + self.attention(x, x, x, need_weights=False)[0])


class Regularised(nn.Module):
    """Adds the squares of a weight to its output."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return self.lin(x) + 0.01 * self.lin.weight.pow(2).sum()


class Functional(nn.Module):
    """Calls its Linear with other tensors: scaled ones, or parameters of another module."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.lin, self.other = kind, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        of_module = self.other if self.kind == "of another module" else self.lin
        tensors = dict(of_module.named_parameters())
        if self.kind == "scaled":
            tensors = {name: 1.5 * parameter for name, parameter in tensors.items()}
        return self.other(functional_call(self.lin, tensors, (x,)))


class Convolutions(nn.Module):
    """Weights in channels_last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x.reshape(1, 4, 5, 8)).reshape(x.shape) + x


class CastsToWeight(nn.Module):
    """Casts its input to the dtype of a safe weight, before ops that autocast leaves alone."""

    def __init__(self):
        super().__init__()
        self.lin, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = (x * 1.7).to(self.lin.weight.dtype)
        return self.gate(self.lin(x) + x * x)


def _blocks(block):
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(block() for _ in range(2))
    model.head = nn.Linear(8, 8)
    model.forward = lambda x: model.head(model.blocks[1](model.blocks[0](x)))
    return model


def _steps(model, autocast):
    """Return the losses of a few steps of a plain loop. Every rank has the same batches."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for index in range(NUM_STEPS):
        torch.manual_seed(index)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(20, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _wrap(model, stage, units, dtype="bfloat16", more=None):
    cfg = config(stage, dtype=dtype, threshold=0)
    for key, values in (more or {}).items():
        cfg[key] = cfg.get(key, {}) | values
    inputs = torch.randn(20, 8)
    return zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg), None, units, example_inputs=inputs)


def _differing(block, units, dtype, stages, more=None):
    """Return what differs from one process, whose weights are contiguous."""
    model = _blocks(block)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    losses = _steps(model, dtype is not None)
    expected = {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}
    found = []
    for stage in stages:
        wrapped = _wrap(_blocks(block), stage, units, dtype, more)
        found += [] if _steps(wrapped, False) == losses else [f"losses at stage {stage}"]
        found += same_bits(full_parameters(wrapped), expected)
    return found


_scaled, _other = partial(Functional, "scaled"), partial(Functional, "of another module")
AUTO = {"torch_autocast": {"lower_precision_safe_modules": "auto"}}
FP32 = {"zeroamp": {"overrides": [{"modules": "*.lin", "param": "fp32"}]}}


@pytest.mark.parametrize(
    ("block", "units", "dtype", "stages", "more"),
    [
        (Attention, {"Linear"}, "bfloat16", (0, 3), {}),
        (Regularised, {"Regularised"}, None, (0,), {}),
        (_scaled, {"Functional"}, None, (3,), {}),
        (Convolutions, {"Convolutions"}, "bfloat16", (3,), {}),
        (CastsToWeight, {"CastsToWeight"}, "bfloat16", (3,), AUTO),
        (CastsToWeight, {"CastsToWeight"}, "bfloat16", (0,), FP32),
    ],
    ids=[
        *("MultiheadAttention", "a weight in the loss", "scaled weights", "channels_last"),
        *("dtype of a traced weight", "dtype of an fp32 weight"),
    ],
)
def test_the_same_bits_as_one_process(ranks2, block, units, dtype, stages, more):
    assert ranks2.run(_differing, block, units, dtype, stages, more) == [[], []]


def _error(block, units, stage):
    with pytest.raises(zeroamp.WrapError) as error:
        _steps(_wrap(_blocks(block), stage, units), False)
    return str(error.value)


def test_a_read_of_a_sharded_weight_names_the_module_that_reads_it(ranks2):
    text = ranks2.run(_error, Regularised, {"Linear"}, 3)[0]
    assert text.startswith("blocks.0 (a Regularised) read a sharded parameter of another module")
    assert "In auto_wrap_policy, name Regularised or a module around it" in text


@pytest.mark.parametrize(("block", "stage"), [(_scaled, 0), (_other, 3)], ids=["scaled", "of another module"])
def test_a_unit_called_with_other_tensors_is_an_error(ranks2, block, stage):
    """A unit that is called with other tensors is an error with the parameter's name."""
    text = ranks2.run(_error, block, {"Linear"}, stage)[0]
    assert "The FSDP unit of blocks.0.lin.weight was called with another tensor" in text
    assert "torch.nn.functional.linear" in text


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (x @ self.weight).real


def test_a_complex_parameter_is_an_error_that_says_what_to_hold_instead(ranks2):
    text = ranks2.run(_error, Complex, {"Complex"}, 3)[0]
    assert text.startswith("blocks.0.weight is trainable and complex")
    assert "torch.view_as_real" in text


def _root_and_parts():
    """Train the root and its first two blocks by turns, each called and differentiated by itself."""

    def train(model):
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for index in range(4):
            torch.manual_seed(index)
            part = (model, model[0], model[1])[index % 3]
            loss = part(torch.randn(4, 8)).float().square().mean()
            loss.backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    found = []
    expected = copy.deepcopy(model)
    losses = train(expected)
    for stage in (0, 3):
        wrapped = _wrap(copy.deepcopy(model), stage, {"Sequential"}, None)
        found += [] if train(wrapped) == losses else [f"losses at stage {stage}"]
        found += same_bits(full_parameters(wrapped), dict(expected.named_parameters()))
    return found


def test_a_unit_called_outside_of_the_root_has_the_bits(ranks2):
    """A unit that is called and differentiated outside of the root has the bits of one process."""
    assert ranks2.run(_root_and_parts) == [[], []]
