"""The observers: what they note, that they change nothing, and that one storage is never taken for another."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zeroamp.hooks.observers.observed_dtypes import Observations, OpObserver, UnitObserver

BF16 = torch.bfloat16


def seen(forward, **parameters):
    """What is noted of parameters that `forward` uses: {name: {dtype: first op}}."""
    observations = Observations()
    ops = OpObserver(observations)
    for name, parameter in parameters.items():
        ops.follow(name, parameter)
    with ops:
        forward()
    return {name: noted.get("compute", {}) for name, noted in observations.seen.items()}


def weight(dtype=BF16, *shape):
    return torch.ones(shape or (4, 4), dtype=dtype)


def test_the_op_that_consumes_a_parameter_is_noted_with_the_dtype_of_its_inputs():
    w, b, x = weight(), weight(BF16, 4), torch.ones(2, 4, dtype=BF16)
    assert seen(lambda: F.linear(x, w, b), w=w, b=b) == {"w": {"bf16": "aten.addmm"}, "b": {"bf16": "aten.addmm"}}
    assert seen(lambda: w * torch.ones(4), w=w) == {"w": {"fp32": "aten.mul"}}, "promoted"
    assert seen(lambda: F.embedding(torch.tensor([1]), w), w=w) == {"w": {"bf16": "aten.embedding"}}
    assert seen(lambda: x + 1, w=w) == {}


@pytest.mark.parametrize(
    "move",
    [
        lambda w: w.float(),
        lambda w: w.t().float()[:2].t(),
        lambda w: w.float().clone().view(2, 8),
        lambda w: torch.cat([w, w]).float(),
        lambda w: torch.stack([w.float()] * 2).flatten(1),
        lambda w: w.float()[torch.tensor([0, 1])],
    ],
)
def test_casts_copies_and_views_are_followed_to_the_op_and_not_noted(move):
    w = weight()
    assert seen(lambda: move(w).sum(), w=w) == {"w": {"fp32": "aten.sum"}}


def test_several_dtypes_are_all_noted():
    w = weight()
    assert seen(lambda: (w.sum(), w.float().sum()), w=w) == {"w": {"bf16": "aten.sum", "fp32": "aten.sum"}}


def test_autocasts_own_cast_is_a_move():
    w, x = weight(torch.float32), torch.ones(2, 4)

    def forward():
        with torch.autocast("cpu", dtype=BF16):
            F.linear(x, w)

    assert seen(forward, w=w) == {"w": {"bf16": "aten.mm"}}


def test_writes_into_a_parameter_are_not_its_use():
    w = weight()
    assert seen(lambda: w.copy_(torch.zeros(4, 4)), w=w) == {}


def test_a_storage_that_was_freed_is_not_taken_for_a_copy_of_a_parameter():
    w = weight(torch.float32, 64, 64)

    def forward():
        for _ in range(50):
            w.to(BF16)  # freed at once, but for the observer
        for _ in range(50):
            torch.ones(64, 64, dtype=BF16).sum()

    assert seen(forward, w=w) == {}


def test_results_are_the_ones_without_it():
    x, module = torch.randn(2, 4), nn.Linear(4, 4)
    expected = module(x)
    ops = OpObserver(Observations())
    ops.follow("w", module.weight)
    with ops:
        assert torch.equal(module(x), expected)
    ops.forget()
    with ops:
        module(x)
    assert ops._observations.seen["w"]["compute"] == {"fp32": "aten.addmm"}


class _Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x))


def _watch(sums_in=None, **grad_dtypes):
    model = _Parts().to(BF16)
    for fqn, dtype in grad_dtypes.items():
        model.get_parameter(fqn.replace("__", ".")).grad_dtype = dtype
    observations = Observations()
    units = UnitObserver(observations, OpObserver(observations), sums_in)
    handles = units.attach(model, {"": ["first.weight"], "second": ["second.weight", "first.bias"]})
    output = model(torch.ones(1, 2, dtype=BF16))
    output.sum().backward()
    return observations, units, handles, model


def test_gathered_dtypes_are_noted_where_the_unit_runs_and_raw_gradients_in_backward():
    observations, units, handles, model = _watch()
    assert observations.seen["first.weight"]["param"] == {"bf16": "the forward of the root"}
    assert observations.seen["first.bias"]["param"] == {"bf16": "the forward of second"}
    assert observations.seen["first.weight"]["gradient"] == {"bf16": "backward"}
    assert "gradient" not in observations.seen["second.weight"], "frozen"
    units.detach()
    for handle in handles:
        handle.remove()
    assert not model.first.weight._backward_hooks
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_gradient_that_autograd_casts_to_the_dtype_of_a_sum_is_no_raw_one():
    observations, *_ = _watch(torch.float32, first__weight=torch.float32)
    assert "gradient" not in observations.seen["first.weight"]
    observations, *_ = _watch(None, first__weight=torch.float32)
    assert observations.seen["first.weight"]["gradient"] == {"fp32": "backward"}
