"""`count_flops` against FLOPs counted by hand."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zeroamp
from tests.models.small import VOCAB, WIDTH, batch, build


def test_a_linear_is_three_products_or_two_where_its_input_needs_no_gradient():
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    assert zeroamp.count_flops(model, torch.ones(5, 8)) == 2 * first + 3 * second
    model[0].weight.requires_grad_(False)
    assert zeroamp.count_flops(model, torch.ones(5, 8)) == first + 2 * second


def test_a_llama_is_its_products_and_its_attention():
    tokens = batch("llama_tied", 0)
    (num_sequences, length), num_tokens = tokens.shape, tokens.numel()
    weights = 3 * (3 + 1 + 4 + 2) * WIDTH**2 + VOCAB * WIDTH
    attention = 3 * 2 * 2 * num_sequences * length**2 * WIDTH  # 3 blocks, two products forward
    counted = zeroamp.count_flops(build("llama_tied"), (tokens,))
    assert counted == 6 * weights * num_tokens + 3 * attention


class Recomputing(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.recomputes = recomputes

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False) if self.recomputes else self.layers(x)


def test_what_is_recomputed_is_not_counted():
    x = torch.ones(4, 8)
    assert zeroamp.count_flops(Recomputing(True), x) == zeroamp.count_flops(Recomputing(False), x) == 5 * 2 * 4 * 8 * 8
    with FlopCounterMode(display=False) as counter:
        Recomputing(True)(x).sum().backward()
    assert counter.get_total_flops() > 5 * 2 * 4 * 8 * 8


@pytest.mark.parametrize("name", ["llama_tied", "conv"])
def test_it_counts_as_torch_does_what_is_not_recomputed(name):
    model, inputs = build(name).to("meta"), batch(name, 0)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with FlopCounterMode(display=False) as counter:
        outputs = model(*(tensor.to("meta") for tensor in inputs))
        outputs.backward(torch.ones_like(outputs))
    assert zeroamp.count_flops(build(name), inputs) == counter.get_total_flops()


def test_the_model_is_left_as_it_was():
    model = build("llama_tied")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    zeroamp.count_flops(model, (batch("llama_tied", 0),))
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


class Reads(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_model_that_fake_tensors_cannot_run_is_refused():
    with pytest.raises(zeroamp.WrapError, match="Reads .*without values.* an estimate"):
        zeroamp.count_flops(Reads(), torch.ones(2))
