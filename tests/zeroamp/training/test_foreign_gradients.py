"""Gradients that another model's backward or another `TrainStep` left are refused by name, never added."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.small import ThreeUnits, loss_of
from tests.oracles.plain_loop import PlainStep
from tests.processes.training import SmallTraining, adamw, config, full_parameters, policy, same_bits
from zeroamp.training.step import step_of


def _left_gradients(stage, options):
    """A plain backward, then an optimizer step; return its error, and the parameters after a step without gradients."""
    parameters = []
    for is_foreign in (True, False):
        training = SmallTraining(config(stage, **options), adamw)
        for first in (6, 10):
            if is_foreign and first == 10:
                training.loss(7).backward()
                with pytest.raises(zeroamp.StepError) as raised:
                    training.backward(is_last=False)
                assert step_of(training.train).is_between_steps
                training.train.zero_grad()
            training.backward(first, is_last=False)
            training.backward(first + 1, is_last=True)
            training.train.step()
        parameters.append(training.parameters())
    return str(raised.value), same_bits(*parameters)


@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (3, {"data_types": {"grad_accum_dtype": "bf16"}})],
    ids=["stage 0", "stage 3, accumulated in bf16"],
)
def test_gradients_before_the_first_backward_are_refused_by_name(ranks2, stage, options):
    for error, differing in ranks2.run(_left_gradients, stage, options):
        assert "embed.weight has a gradient" in error
        assert "zero_grad()" in error
        assert differing == []


def _beside_backwards(stage, between, retain):
    """The parameters after two steps, and the norms of gradients of inputs.

    `between` calls autograd.grad for the inputs in every micro-batch and after the update, and forwards with gradients
    before the update.
    """
    torch.manual_seed(0)
    cfg = config(stage, dtype=None, clip=0.1, accumulation=2)
    model = zeroamp.wrap_model(ThreeUnits(), policy(cfg), None, {"Linear"})
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    norms = []
    for index in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * index + dist.get_rank())).requires_grad_()
        loss = loss_of(model, x)
        if between:
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=retain)
            norms.append(float(gradient.norm()))
            loss_of(model, x).backward(inputs=[x])
            assert torch.equal(x.grad, gradient)
        train.backward(loss if retain or not between else loss_of(model, x))
        if index % 2 == 0:
            train.step()
            continue
        train.clip_grad_norm()
        if between:
            loss_of(model, x)
        train.update()
        if between:
            torch.autograd.grad(loss_of(model, x), x)
    return full_parameters(model), norms


@pytest.mark.parametrize(("stage", "retain"), [(0, False), (3, True)], ids=["another forward", "the same graph"])
def test_gradients_of_inputs_change_nothing(ranks2, stage, retain):
    """Gradients of inputs and forwards change nothing where the config clips and accumulates."""
    expected = ranks2.run(_beside_backwards, stage, False, retain)
    for (ours, norms), (theirs, _) in zip(ranks2.run(_beside_backwards, stage, True, retain), expected, strict=True):
        assert same_bits(ours, theirs) == []
        assert min(norms) > 0


CLIP = 1e6


def _gan(is_wrapped):
    """Three rounds of a GAN on this rank: the losses, and the parameters of both models."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    models, steps = [generator, ThreeUnits()], []
    for number, model in enumerate(models):
        if is_wrapped:
            models[number] = zeroamp.wrap_model(model, policy(config(2, dtype=None, clip=CLIP)), None, {"Linear"})
        optimizer = torch.optim.SGD(models[number].parameters(), lr=0.1)
        step = zeroamp.TrainStep(models[number], optimizer) if is_wrapped else PlainStep(model, optimizer, CLIP)
        steps.append(step)
    (generator, discriminator), losses = models, []
    for index in range(6):
        noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(index // 2))
        step = steps[index % 2]
        step.zero_grad()
        made = generator(noise)
        loss = discriminator(made) if index % 2 == 0 else -discriminator(made.detach())
        losses.append(float(loss.detach()))
        step.backward(loss)
        step.step()
    return losses, [full_parameters(model) for model in models]


def test_two_models_train_as_in_one_process(ranks2):
    """With clipping, the other model's backward is guarded: a backward that any TrainStep runs passes."""
    losses, parameters = _gan(False)
    for found, ours in ranks2.run(_gan, True):
        assert found == losses
        for model, expected in zip(ours, parameters, strict=True):
            assert same_bits(model, expected) == []


def _two_steps_of_one_model():
    training = SmallTraining(config(3), lambda parameters: torch.optim.SGD(parameters[::2], lr=0.1))
    model, first = training.model, training.train
    second = zeroamp.TrainStep(model, torch.optim.SGD(list(model.parameters())[1::2], lr=0.1))
    first.backward(training.loss(0), is_last=False)
    with pytest.raises(zeroamp.StepError, match="Another TrainStep.*1 micro-batch.*zero_grad"):
        second.backward(training.loss(1), is_last=True)
    first.backward(training.loss(1), is_last=True)
    first.step()
    second.backward(training.loss(2), is_last=False)
    first.zero_grad()  # of the model: what the second has run is discarded, too
    assert step_of(second).is_between_steps
    second.backward(training.loss(3), is_last=True)
    loss = second.step().loss
    return loss, float(training.loss(3).detach()), [train.num_steps for train in (first, second)]


def test_two_train_steps_of_one_model_know_each_other(ranks2):
    for loss, after, counts in ranks2.run(_two_steps_of_one_model):
        assert loss > after, "the second step trained on its last micro-batch alone"
        assert loss < 1.5 * after, "the loss of the discarded micro-batch is discarded"
        assert counts == [1, 1]
