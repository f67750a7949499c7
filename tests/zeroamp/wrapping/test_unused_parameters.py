"""Parameters that some ranks, or some micro-batches, do not use."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.processes.training import config, full_parameters
from tests.selection import CAN_ZERO_FILL, needs_zero_fill
from zeroamp.hooks._torch.fsdp import zero_fill_unused


class Branching(nn.Module):
    """Units with a branch that only some inputs take."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x, takes_branch):
        for block in self.blocks:
            x = block(x, takes_branch)
        return x.float().square().mean()


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.branch, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, takes_branch):
        x = self.always(x)
        return self.norm(self.branch(x)) if takes_branch else x


def _inputs(index):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


def _train(stage, takes_branch, accumulation, comm):
    """takes_branch[micro][rank]. One SGD step; return the gradients it saw as changes of the parameters."""
    torch.manual_seed(0)
    cfg = config(stage, accumulation=accumulation, comm=comm)
    model = zeroamp.wrap_model(Branching(), zeroamp.policy_from_config(cfg))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
    rank = dist.get_rank()
    for micro in range(accumulation):
        step.backward(model(_inputs(2 * micro + rank), takes_branch[micro][rank]))
        report = step.step()
    return full_parameters(model), report.grad_norm


def _expected(takes_branch, accumulation):
    torch.manual_seed(0)
    model = Branching()
    totals = {fqn: torch.zeros_like(p) for fqn, p in model.named_parameters()}
    for micro in range(accumulation):
        for rank in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(_inputs(2 * micro + rank), takes_branch[micro][rank])
            gradients = torch.autograd.grad(loss / accumulation, list(model.parameters()), materialize_grads=True)
            for total, gradient in zip(totals.values(), gradients, strict=True):
                total += gradient / 2
    return {fqn: p.detach() - totals[fqn] for fqn, p in model.named_parameters()}


def _check(results, takes_branch, accumulation):
    expected = _expected(takes_branch, accumulation)
    for parameters, _ in results:
        for fqn, parameter in parameters.items():
            # The sums over ranks and micro-batches are taken in another order here and there.
            torch.testing.assert_close(parameter, expected[fqn], rtol=0, atol=1e-6, msg=fqn)


@needs_zero_fill
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_branch_that_one_rank_takes_is_averaged_with_zeros(ranks2, stage):
    takes_branch = [[True, False]]
    _check(ranks2.run(_train, stage, takes_branch, 1, None), takes_branch, 1)


@needs_zero_fill
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "pattern", [[[False, True], [False, False], [True, True]], [[True, False], [False, False]]], ids=str
)
def test_a_branch_that_some_micro_batches_take(ranks2, stage, pattern):
    _check(ranks2.run(_train, stage, pattern, len(pattern), "fp32"), pattern, len(pattern))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_branch_that_only_the_last_micro_batch_takes(ranks2, stage):
    pattern = [[False, False], [True, True]]
    _check(ranks2.run(_train, stage, pattern, 2, "fp32"), pattern, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_branch_that_nobody_takes(ranks2, stage):
    pattern = [[False, False]]
    _check(ranks2.run(_train, stage, pattern, 1, None), pattern, 1)


def _zero_fill():
    torch.manual_seed(0)
    model = zeroamp.wrap_model(Branching(), zeroamp.policy_from_config(config(3)))
    return zero_fill_unused(model)


def test_zero_filling_is_on_where_torch_has_it(ranks2):
    assert ranks2.run(_zero_fill)[0] is CAN_ZERO_FILL
