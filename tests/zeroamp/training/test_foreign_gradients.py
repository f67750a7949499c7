"""Gradients that another model's backward or another `TrainStep` left are refused by name, never added."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.small import ThreeUnits, batch, loss_of
from tests.processes.training import config, full_parameters, policy, same_bits, wrapped
from tests.selection import slow_but
from zeroamp.training.step import driver_of

NAME = "llama_tied"


def _step(train, index):
    for is_last in (False, True):
        train.backward(loss_of(train.model, batch(NAME, 2 * index + is_last + dist.get_rank())), is_last=is_last)
    train.step()


def _left_gradients(stage, options):
    """A plain backward, then an optimizer step; return its error, and the parameters after a step without gradients."""
    parameters = []
    for is_foreign in (True, False):
        model = wrapped(NAME, config(stage, **options))
        train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        _step(train, 3)
        if is_foreign:
            loss_of(model, batch(NAME, 7)).backward()
            with pytest.raises(zeroamp.StepError) as raised:
                train.backward(loss_of(model, batch(NAME, dist.get_rank())), is_last=False)
            assert driver_of(train).is_between_steps
            train.zero_grad()
        _step(train, 5)
        parameters.append(full_parameters(model))
    return str(raised.value), same_bits(*parameters)


SUMMED_LOW = {"data_types": {"grad_accum_dtype": "bf16"}}


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        (3, {}),
        pytest.param(2, SUMMED_LOW, marks=pytest.mark.slow),
        (3, SUMMED_LOW),
    ],
)
def test_gradients_before_the_first_backward_are_refused_by_name(ranks2, stage, options):
    for error, differing in ranks2.run(_left_gradients, stage, options):
        assert "embed.weight has a gradient" in error
        assert "zero_grad()" in error
        assert differing == []


def _beside_steps(stage, between):
    """The parameters after two steps, with `between` called before the update of the first and after it."""
    torch.manual_seed(0)
    cfg = config(stage, dtype=None)
    model = zeroamp.wrap_model(ThreeUnits(), policy(cfg), None, {"Linear"})
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    for index in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * index + dist.get_rank()))
        train.backward(loss_of(model, x))
        train.clip_grad_norm()
        if between:
            loss_of(model, x)  # a forward with gradients
        train.update()
        if between:
            x = x.requires_grad_()
            torch.autograd.grad(loss_of(model, x), x)
    return full_parameters(model)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_forwards_before_the_update_and_gradients_of_inputs_after_it_change_nothing(ranks2, stage):
    expected = ranks2.run(_beside_steps, stage, False)
    for ours, theirs in zip(ranks2.run(_beside_steps, stage, True), expected, strict=True):
        assert same_bits(ours, theirs) == []


def _input_gradients(stage, options, between, retain):
    """The parameters after two steps; `between` calls autograd.grad for the inputs in every micro-batch and step."""
    torch.manual_seed(0)
    cfg = config(stage, dtype=None, clip=0.1, accumulation=2, **options)
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
        train.step()
    return full_parameters(model), norms


@pytest.mark.parametrize("retain", [False, True], ids=["another forward", "the same graph"])
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_gradients_of_inputs_pass_where_the_config_clips_and_accumulates(ranks2, stage, retain):
    expected = ranks2.run(_input_gradients, stage, {}, False, retain)
    for (ours, norms), (theirs, _) in zip(ranks2.run(_input_gradients, stage, {}, True, retain), expected, strict=True):
        assert same_bits(ours, theirs) == []
        assert min(norms) > 0


def _plain_backwards():
    """The errors of backwards that set gradients of parameters; autograd.grad for a parameter passes."""
    model = zeroamp.wrap_model(ThreeUnits(), policy(config(2, dtype=None, clip=0.1)), None, {"Linear"})
    errors = []
    loss_of(model, torch.ones(4, 8))
    weight = dict(model.named_parameters())["layers.2.weight"]  # unsharded
    for inputs in (None, [weight], [dict(model.named_parameters())["layers.0.bias"]]):
        with pytest.raises(zeroamp.StepError) as raised:
            loss_of(model, torch.ones(4, 8)).backward(inputs=inputs)
        errors.append(str(raised.value))
    (gradient,) = torch.autograd.grad(loss_of(model, torch.ones(4, 8)), weight)
    return errors, gradient.shape


def test_a_plain_backward_for_parameters_is_refused_also_for_some_of_them(ranks2):
    for errors, shape in ranks2.run(_plain_backwards):
        assert all("gradient_clipping 0.1, which a plain backward ignores" in error for error in errors)
        assert shape == (8, 8)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _gan(is_wrapped, clip):
    """Three rounds of a GAN on this rank: the losses, and the parameters of both models."""
    torch.manual_seed(0)
    models = [Generator(), ThreeUnits()]
    if is_wrapped:
        cfg = config(2, dtype=None, clip=clip)
        models = [zeroamp.wrap_model(model, policy(cfg), None, {"Linear"}) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    steps = [zeroamp.TrainStep(*pair) for pair in zip(models, optimizers, strict=True)] if is_wrapped else [None] * 2
    generator, discriminator = models
    losses = []
    for index in range(3):
        noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
        for number, loss_fn in enumerate(
            [lambda x: discriminator(generator(x)), lambda x: -discriminator(generator(x).detach())]
        ):
            if is_wrapped:
                steps[number].zero_grad()
            else:
                optimizers[number].zero_grad()
            loss = loss_fn(noise)
            losses.append(float(loss.detach()))
            if is_wrapped:
                steps[number].backward(loss)
                steps[number].step()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(models[number].parameters(), clip or float("inf"))
                optimizers[number].step()
    return losses, [full_parameters(model) for model in models]


@pytest.mark.parametrize("clip", [0.0, 1e6])
def test_two_models_train_as_in_one_process(ranks2, clip):
    """With clipping, the other model's backward is guarded: a backward that any TrainStep runs passes."""
    losses, parameters = _gan(False, clip)
    for found, ours in ranks2.run(_gan, True, clip):
        assert found == losses
        for model, expected in zip(ours, parameters, strict=True):
            assert same_bits(model, expected) == []


def _two_steps_of_one_model(stage):
    model = wrapped(NAME, config(stage))
    parameters = list(model.parameters())
    first, second = (
        zeroamp.TrainStep(model, torch.optim.SGD(params, lr=0.1)) for params in (parameters[::2], parameters[1::2])
    )
    first.backward(loss_of(model, batch(NAME, 0)), is_last=False)
    with pytest.raises(zeroamp.StepError, match="Another TrainStep.*1 micro-batch.*zero_grad"):
        second.backward(loss_of(model, batch(NAME, 1)), is_last=True)
    first.backward(loss_of(model, batch(NAME, 1)), is_last=True)
    first.step()
    second.backward(loss_of(model, batch(NAME, 2)), is_last=False)
    first.zero_grad()  # of the model: what the second has run is discarded, too
    assert driver_of(second).is_between_steps
    second.backward(loss_of(model, batch(NAME, 3)), is_last=True)
    loss = second.step().loss
    return loss, float(loss_of(model, batch(NAME, 3)).detach()), [train.num_steps for train in (first, second)]


@pytest.mark.parametrize("stage", [0, 3])
def test_two_train_steps_of_one_model_know_each_other(ranks2, stage):
    for loss, after, counts in ranks2.run(_two_steps_of_one_model, stage):
        assert loss > after, "the second step trained on its last micro-batch alone"
        assert loss < 1.5 * after, "the loss of the discarded micro-batch is discarded"
        assert counts == [1, 1]
