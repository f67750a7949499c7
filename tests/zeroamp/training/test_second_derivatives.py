"""`create_graph=True`: at stage 0 the bits of one process, at other stages an error before anything was freed."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import zeroamp
from tests.oracles.plain_loop import PlainStep
from tests.processes.training import config, full_parameters, same_bits

NUM_STEPS = 3


class Critic(nn.Module):
    """Units in a row; the last layer belongs to the root. With `inside`, the forward differentiates itself.

    A unit's input has at most two gradients, whose order of addition does not matter (`docs/limits.md`).
    """

    def __init__(self, inside=False):
        super().__init__()
        self.inside = inside
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 1, bias=False)

    def forward(self, x):
        h = x
        for block in self.blocks:
            h = block(h)
        energy = self.head(h.tanh())
        if not self.inside:
            return energy
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


def _built(inside=False):
    torch.manual_seed(0)
    return Critic(inside)


def _batch(index):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index)).requires_grad_()


def penalty_of_inputs(model, x):
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def penalty_of_parameters(model, x):
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients)


def penalty_alone(model, x):
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def forces(model, x):
    energy, force = model(x)
    return energy.square().mean() + force.square().mean()


LOSSES = {loss.__name__: loss for loss in (penalty_of_inputs, penalty_of_parameters, penalty_alone, forces)}


def _wrapped(stage, loss_of=None, **more):
    policy = zeroamp.policy_from_config(config(stage, **more))
    return zeroamp.wrap_model(_built(loss_of is forces), policy, auto_wrap_policy={"Sequential"})


def _train(model, step, loss_of, dtype, accumulation):
    """Both ranks have the same batches, so averages change no bit."""
    for index in range(NUM_STEPS * accumulation):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, _batch(index))
        if isinstance(model, FSDPModule) and isinstance(step, PlainStep):
            with torch.no_grad():  # an evaluation in between, which otherwise reshards
                inside, model.inside = model.inside, False
                model(_batch(0))
                model.inside = inside
        step.backward(loss)
        if isinstance(model, FSDPModule) and isinstance(step, PlainStep):
            model.reshard()
        step.step()
    return full_parameters(model)


def _differ(loss_name, dtype, accumulation, is_plain):
    loss_of = LOSSES[loss_name]
    found = []
    for model in (
        _built(loss_of is forces),
        _wrapped(0, loss_of, dtype=None if dtype is None else "bfloat16", accumulation=accumulation),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        is_reference = is_plain or not isinstance(model, FSDPModule)
        step = PlainStep(model, optimizer, 0.0, accumulation) if is_reference else zeroamp.TrainStep(model, optimizer)
        found.append(_train(model, step, loss_of, dtype, accumulation))
    return same_bits(*found)


@pytest.mark.parametrize(
    ("loss_name", "dtype", "accumulation", "is_plain"),
    [
        *((loss_name, None, 2, False) for loss_name in LOSSES),
        ("penalty_of_inputs", torch.bfloat16, 1, False),
        ("forces", torch.bfloat16, 1, False),
        ("penalty_of_parameters", None, 1, True),
        ("forces", None, 1, True),
    ],
)
def test_at_stage_0_second_derivatives_have_the_bits_of_one_process(ranks2, loss_name, dtype, accumulation, is_plain):
    assert ranks2.run(_differ, loss_name, dtype, accumulation, is_plain) == [[]] * 2


def _refused(stage, loss_name):
    loss_of = LOSSES[loss_name]
    model = _wrapped(stage, loss_of)
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(zeroamp.StepError, match=f'create_graph=True at ZeRO stage {stage}.*"stage": 0'):
        loss_of(model, _batch(0))
    if loss_of is forces:
        return  # an error inside of a forward ends the training
    output = model(_batch(0))  # nothing has begun: training goes on
    train.backward(output.square().mean())
    assert train.step().grad_norm > 0


@pytest.mark.parametrize(("stage", "loss_name"), [(1, "forces"), (2, "penalty_of_inputs"), (3, "forces")])
def test_at_other_stages_they_are_refused(ranks2, stage, loss_name):
    ranks2.run(_refused, stage, loss_name)


def _backward_with_graph(stage):
    model = _wrapped(stage)
    remedy = r"torch\.autograd\.grad\(loss" if stage == 0 else '"stage": 0'
    with pytest.raises(zeroamp.StepError, match=f"create_graph=True.*{remedy}"):
        model(_batch(0)).square().mean().backward(create_graph=True)
    model(_batch(0)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_that_would_lose_the_graph_of_parameter_gradients_is_refused(ranks2, stage):
    ranks2.run(_backward_with_graph, stage)
