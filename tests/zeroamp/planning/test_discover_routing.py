"""Models whose control flow depends on values: `discover_safe_parameters` runs them for real, or says why it cannot."""

import functools

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.parameter_uses import Uses
from tests.oracles.low_precision_gather import gathered, is_unchanged, randomise
from zeroamp.planning import discover

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))


class Experts(nn.Module):
    """Routes by value, so that only a real run can follow it; expert 2 is reached if the first input is positive."""

    def __init__(self, last=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)])
        if last is not None:
            self.experts[2] = last

    def forward(self, x):
        y = self.norm(x)
        for i, expert in enumerate(self.experts):
            if i < 2 or x[0, 0] > 0:
                y = y + expert(y)
        return y


def _routed(positive):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 1.0 if positive else -1.0
    return x


@pytest.mark.parametrize("positive", [True, False])
def test_an_expert_that_is_not_reached_follows_its_twins(positive):
    model = randomise(Experts())
    found = zeroamp.discover_safe_parameters(model, (_routed(positive),))
    assert found.safe == {f"experts.{i}.0.{kind}" for i in range(3) for kind in ("weight", "bias")}
    expected = (
        "cast to bf16 in experts.2.0"
        if positive
        else "not reached by the example inputs, but the same code as experts.0"
    )
    assert found.reasons["experts.2.0.weight"] == f"safe: {expected}"
    if not positive:
        assert found.reasons["experts.2.1.weight"] == "not safe: never used in the traced run"
    # The oracle routes to it.
    x = _routed(True)
    assert is_unchanged(model, gathered(model, found.safe), (x,), {})


def _patched():
    expert = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    expert[0].forward = lambda x: x + expert[0].weight.sum()
    return expert


def _hooked():
    expert = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    expert[0].register_forward_pre_hook(lambda module, args: args[0] * module.weight.mean())
    return expert


class OtherLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(OtherLinear(8, 8), nn.LayerNorm(8)),
        lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8)),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.LayerNorm(8)),
        _patched,
        _hooked,
    ],
    ids=["class", "parameters", "training", "depth", "frozen", "patched", "hooked"],
)
def test_an_expert_that_is_not_like_the_others_follows_none(make):
    found = zeroamp.discover_safe_parameters(Experts(last=make()), (_routed(False),))
    assert found.reasons["experts.2.0.weight"] == "not safe: never used in the traced run"
    assert not any(name.startswith("experts.2") for name in found.safe)


def test_a_tied_weight_of_an_expert_that_is_not_reached_is_judged_by_its_other_uses():
    model = Experts()
    model.after = nn.Linear(8, 8)
    model.after.weight = model.experts[2][0].weight
    model.norm.register_forward_hook(lambda module, args, output: output * model.after.weight.mean())
    found = zeroamp.discover_safe_parameters(model, (_routed(False),))
    assert found.reasons["experts.2.0.weight"].startswith("not safe: read in fp32 by aten.mean")


def test_experts_that_all_have_a_forward_of_their_own_follow_none():
    model = Experts()
    for expert in model.experts:
        expert.forward = functools.partial(nn.Sequential.forward, expert)
    found = zeroamp.discover_safe_parameters(model, (_routed(False),))
    assert found.reasons["experts.2.0.weight"] == "not safe: never used in the traced run"


def test_an_expert_that_is_run_in_part_follows_none():
    model = Experts()
    model.norm.register_forward_hook(lambda module, args, output: model.experts[2][1](output))
    found = zeroamp.discover_safe_parameters(model, (_routed(False),))
    assert found.reasons["experts.2.0.weight"] == "not safe: never used in the traced run"


def test_without_routing_by_value_an_unused_module_follows_none():
    model = Experts()
    model.forward = lambda x: model.experts[1](model.experts[0](x))
    found = zeroamp.discover_safe_parameters(model, (X,))
    assert found.reasons["experts.2.0.weight"] == "not safe: never used in the traced run"


def test_a_model_that_needs_values_and_cannot_have_them(monkeypatch):
    with torch.device("meta"):
        model = Experts()
    with pytest.raises(
        zeroamp.ConfigError,
        match=r"lower_precision_safe_modules .*Experts.*on the meta device",
    ):
        zeroamp.discover_safe_parameters(model, (_routed(True),))
    with pytest.raises(zeroamp.ConfigError, match="on the meta device"):
        zeroamp.discover_safe_parameters(Experts(), (_routed(True).to("meta"),))
    monkeypatch.setattr(discover, "MAX_REAL_RUN_BYTES", 900)
    with pytest.raises(zeroamp.ConfigError, match=r"its parameters are 0\.0 GiB"):
        zeroamp.discover_safe_parameters(Experts(), (_routed(True),))


def test_an_error_of_the_forward_is_the_users():
    def forward(m, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        zeroamp.discover_safe_parameters(Uses(forward), (X,))
