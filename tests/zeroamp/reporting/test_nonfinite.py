"""`zeroamp.find_nonfinite` names rank, module and gradient of the first value that is not finite."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.measuring.logs import log_lines
from tests.processes.training import config

KEY = {"zeroamp": {"find_nonfinite": True}}


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


class _BadWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x + 0 * weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.full((8, 8), math.nan)


class Block(nn.Module):
    fault = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.up(x)
        if self.fault == "output":
            h = h / 0
        h = self.down(h)
        if self.fault == "gradient":
            h = _BadGradient.apply(h)
        return _BadWeightGradient.apply(h, self.up.weight) if self.fault == "parameter" else h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _run(fault, stage, more=KEY, num_steps=4, **options):
    """Train. In step 2 (and later, by the parameters) rank 1 has a fault. Return the warnings."""
    torch.manual_seed(0)
    model = zeroamp.wrap_model(
        Model(), zeroamp.policy_from_config(config(stage, **options, **more)), auto_wrap_policy={"Block"}
    )
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with log_lines() as lines:
        for step in range(1, num_steps + 1):
            is_bad = step == 2 and dist.get_rank() == 1
            model.blocks[1].fault = fault if is_bad else None
            x = torch.full((2, 8), math.nan if is_bad and fault == "input" else 1.0)
            loss = model(x).float().square().mean()
            train.backward(loss * (math.nan if is_bad and fault == "loss" else 1.0))
            report = train.step()
            if "zeroamp" not in more:
                _ = report.grad_norm
    return lines


PLACES = {
    "input": "an input of the model",
    "output": r"the output of blocks\.1\.down \(a Linear\)",
    "gradient": r"the gradient of the output of blocks\.1\.down \(a Linear\)",
    "parameter": r"the gradient of blocks\.1\.up\.weight",
    "loss": "the gradient of the output of",
}


@pytest.mark.parametrize("fault", PLACES)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_value_of_the_rank_that_has_it_is_named_in_its_step(ranks2, stage, fault):
    first, second = ranks2.run(_run, fault, stage)
    assert second == []
    (line,) = first
    assert line.startswith("The gradient norm of step 2 is ")
    assert re.search(rf"finite was on rank 1 {PLACES[fault]}[^,]*\.$", line), line


def test_a_skipped_step_is_named_too(ranks2):
    more = {"zeroamp": {"find_nonfinite": True, "skip_nonfinite_steps": True}}
    (line,), _ = ranks2.run(_run, "output", 3, more)
    assert line.startswith("The gradient norm of step 2, which was skipped, is ")


def test_finite_steps_log_nothing(ranks2):
    assert ranks2.run(_run, None, 2) == [[], []]


@pytest.mark.parametrize("more", [{}, {"zeroamp": {"skip_nonfinite_steps": True}}], ids=["default", "skipped steps"])
def test_without_the_key_one_warning_names_it(ranks2, more):
    first, second = ranks2.run(_run, "output", 3, more)
    assert second == []
    (line,) = first
    assert line.startswith("The gradient norm of step 2")
    assert '"find_nonfinite": true' in line


def test_overflows_in_float16_are_no_reason_to_warn(ranks2):
    fp16 = {"initial_scale_power": 40}
    assert ranks2.run(_run, None, 3, {}, dtype="float16", fp16=fp16) == [[], []]


def _plain_backward():
    model = zeroamp.wrap_model(Model(), zeroamp.policy_from_config(config(2, **KEY)))
    with pytest.raises(zeroamp.StepError, match="find_nonfinite True"):
        model(torch.ones(2, 8)).square().mean().backward()


def test_a_plain_backward_that_would_find_nothing_raises(ranks2):
    ranks2.run(_plain_backward)


def _sum_overflows():
    model = zeroamp.wrap_model(nn.Linear(1, 2, bias=False), zeroamp.policy_from_config(config(1, dtype=None, **KEY)))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with log_lines() as lines:
        train.backward((model(torch.tensor([[1.0]])) * torch.tensor([1.0, 3e38])).sum())
        train.step()
    return lines


def test_a_sum_over_ranks_that_overflows_is_named(ranks2):
    (line,), _ = ranks2.run(_sum_overflows)
    assert line.endswith("was on rank 1 the sum over ranks of the gradients of weight in its shard.")
