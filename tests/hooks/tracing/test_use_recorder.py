"""What one run records of a parameter's uses, and what follows for its dtype."""

import pytest
import torch
from torch import nn

from tests.models.autograd_functions import BF16
from tests.models.parameter_uses import USES
from tests.oracles.low_precision_gather import randomise
from zeroamp.hooks.tracing.parameter_record import ParameterRecord, are_disjoint
from zeroamp.hooks.tracing.recorded_run import record_run


def _inputs():
    return (torch.randn(3, 8, generator=torch.Generator().manual_seed(5)).requires_grad_(),)


def _safety(model, args, dtype=BF16, **options):
    return record_run(model, args, {}, dtype=dtype, device_type="cpu", fake=True, **options).safety()


@pytest.mark.parametrize("use", USES)
def test_fake_and_real_runs_record_the_same(use):
    model = randomise(USES[use][0]())
    fake, real = (record_run(model, _inputs(), {}, dtype=BF16, device_type="cpu", fake=fake) for fake in (True, False))
    assert fake.safety() == real.safety()
    assert fake.program == real.program


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])
        self.scale = nn.Parameter(torch.ones(8))
        self.spare = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.spare.weight.shape, self.spare.weight.detach()
        return x * self.scale


def test_the_reason_names_op_and_module():
    safety = _safety(Layers(), _inputs())
    assert safety == {
        "layers.0.weight": (True, "safe: cast to bf16 in layers.0"),
        "layers.0.bias": (True, "safe: cast to bf16 in layers.0"),
        "layers.1.weight": (False, "not safe: read in fp32 by aten.native_layer_norm in layers.1 and 1 more"),
        "layers.1.bias": (False, "not safe: read in fp32 by aten.native_layer_norm in layers.1 and 1 more"),
        "scale": (False, "not safe: read in fp32 by aten.mul in the root and 1 more"),
        "spare.weight": (False, "not safe: never used in the traced run"),
        "spare.bias": (False, "not safe: never used in the traced run"),
    }


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (nn.Parameter(torch.ones(2, dtype=BF16), requires_grad=False), (True, "safe: stored in bf16")),
        (
            nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
            (False, "not safe: int8 is not a floating-point dtype"),
        ),
        (nn.Parameter(torch.ones(2)), (False, "not safe: never used in the traced run")),
    ],
)
def test_what_is_decided_without_a_use(parameter, expected):
    assert ParameterRecord(parameter).safety(BF16, with_backward=True) == expected


def test_frozen_parameters_stored_low():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    model[0].to(torch.float16)
    model[1].to(BF16)
    model[0].table = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    reasons = {name: reason for name, (_, reason) in _safety(model, _inputs()).items()}
    assert reasons["0.weight"] == "safe: cast to bf16 in 0"
    assert reasons["1.weight"] == "safe: stored in bf16"
    assert reasons["0.table"] == "not safe: int8 is not a floating-point dtype"


def test_without_any_gradient_it_does_not_matter_how_often_a_parameter_is_cast():
    make, expected = USES["overlapping rows, frozen"]
    record = record_run(make(), (_inputs()[0].detach(),), {}, dtype=BF16, device_type="cpu", fake=True)
    assert not record.has_run_backward
    assert {name for name, (is_safe, _) in record.safety().items() if is_safe} == expected


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        ([(0, (4, 6), (6, 1))], True),
        ([(0, (2, 6), (6, 1)), (12, (2, 6), (6, 1))], True),
        ([(0, (4, 3), (6, 1)), (3, (4, 3), (6, 1))], True),  # columns: the ranges interleave
        ([(0, (4, 4), (6, 1)), (3, (4, 3), (6, 1))], False),
        ([(0, (4, 6), (0, 1))], False),  # expanded
        ([(0, (6, 4), (1, 6))], True),  # transposed
        ([None], False),
        ([], True),
    ],
)
def test_disjoint_views(extents, expected):
    assert are_disjoint(extents, torch.zeros(4, 6)) is expected
