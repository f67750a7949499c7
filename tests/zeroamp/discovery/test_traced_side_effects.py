"""`discover_safe_parameters` leaves no trace, whether the forward ends or raises."""

import gc
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks

import zeroamp
from zeroamp.hooks._torch.dispatch import FakeTensorMode

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))


class Messy(nn.Module):
    """Changes all it can reach in its forward."""

    def __init__(self, raises):
        super().__init__()
        self.raises = raises
        self.norm = nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 8)
        self.lin = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.lin.weight
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(8))
        self.constant = torch.ones(8)
        self.log = []
        self.seen = {"shapes": [X.shape], "set": {1}}
        self.captured = lambda x, weight=self.lin.weight: F.linear(x, weight)

    def forward(self, x):
        x = self.norm(F.dropout(x, 0.5, training=self.training))
        x = self.captured(self.tied(self.lin(self.lstm(x)[0])) + torch.randn(8) + random.random() + np.random.rand())
        self.count.add_(1)
        self.scale = self.scale * 2
        self.constant.mul_(3)
        with torch.no_grad():
            self.frozen.mul_(2)
        self.cached = x
        self.log.append(x)
        self.seen["shapes"].append(x.shape)
        self.seen["set"].add(2)
        self.norm.eval()
        self.lin.register_forward_hook(lambda *args: None)
        self.added = nn.Linear(2, 2)
        self.register_parameter("late", nn.Parameter(torch.ones(2)))
        if self.raises:
            raise ValueError("from the forward")
        return x * self.frozen * self.scale


def _tensors(model):
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(), ("constant", model.constant)]
    held += [(f"flat {i}", weight) for i, weight in enumerate(model.lstm._flat_weights)]
    return {name: (id(tensor), tensor.detach().clone(), tensor.grad, tensor.requires_grad) for name, tensor in held}


def _structure(model):
    return {
        fqn: (id(module), module.training, [(k, id(v), str(v)) for k, v in vars(module).items()])
        for fqn, module in model.named_modules(remove_duplicate=False)
    }


def _random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def _same_tensors(before, after):
    assert before.keys() == after.keys()
    for name, (identity, value, grad, requires_grad) in before.items():
        assert after[name][0] == identity, name
        assert torch.equal(after[name][1], value), name
        assert after[name][2] is grad, name
        assert after[name][3] == requires_grad, name


@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_the_model_and_the_world_are_as_before(raises):
    model = Messy(raises).train()
    model.lin.bias.grad = torch.ones(8)
    tensors, structure, states = _tensors(model), _structure(model), _random_states()
    hooks = dict(vars(module_hooks))
    if raises:
        with pytest.raises(zeroamp.ConfigError, match=r"test_traced_side_effects\.py.*ValueError: from the forward"):
            zeroamp.discover_safe_parameters(model, (X,))
    else:
        found = zeroamp.discover_safe_parameters(model, (X,))
        assert "lin.weight" in found.safe
        assert set(found.reasons) == {name for name, _ in model.named_parameters()}
    assert _random_states() == states
    assert _structure(model) == structure
    _same_tensors(tensors, _tensors(model))
    assert [h for h in hooks if h.startswith("_global") and hooks[h]] == []
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def test_nothing_stays_in_autocasts_cache():
    model = nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the cache is emptied when the outermost region ends: this one
        zeroamp.discover_safe_parameters(model, (X,))
        gc.collect()
        with FakeTensorMode():
            kind = type(torch.ones(()))
        assert [held for held in gc.get_objects() if type(held) is kind and held.numel() == 64] == []
