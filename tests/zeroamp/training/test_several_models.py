"""Loops of several models, in plain loops and with `TrainStep`, have the bits of plain torch in one process.

docs/losses.md has these loops. `tests/zeroamp/integrations/test_peft_training.py` has one whose teacher is the base.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import zeroamp
from tests.processes.training import config, full_parameters, policy, same_bits

NUM_STEPS = 2


def _network(inputs, outputs, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 16), nn.GELU(), nn.Linear(16, outputs))


def _wrapped(model, stage):
    """The model itself where the stage is None, for one process."""
    return model if stage is None else zeroamp.wrap_model(model, policy(config(stage)), auto_wrap_policy={"Linear"})


def _around(stage):
    """Return the autocast of one process. A wrapped model has its own."""
    return torch.autocast("cpu", torch.bfloat16) if stage is None else nullcontext()


def _adamw(model):
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def _updating(model, optimizers, with_train_step):
    """Return the function that runs an optimizer step of a loss."""
    if with_train_step:
        train = zeroamp.TrainStep(model, optimizers)
        return lambda loss: (train.backward(loss), train.step())

    def update(loss):
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return update


def _inputs(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def _one_loss(stage, with_train_step):
    """b(a(inputs)), where the loss trains both. A `TrainStep` needs both in one wrapped module."""
    a, b = _network(6, 8), _network(8, 5, seed=1)
    if with_train_step:
        both = _wrapped(nn.Sequential(a, b), stage)
    else:
        a, b = _wrapped(a, stage), _wrapped(b, stage)
        both = nn.Sequential(a, b)
    optimizers = [_adamw(a), torch.optim.SGD(b.parameters(), lr=0.1)]
    update, losses = _updating(both, optimizers, with_train_step), []
    for step in range(NUM_STEPS):
        inputs, labels = _inputs(step)
        with _around(stage):
            loss = functional.cross_entropy(both(inputs), labels)
        update(loss)
        losses.append(loss.item())
    return losses, [full_parameters(a), full_parameters(b)]


def _teacher(stage, with_train_step):
    """Distillation from a frozen model."""
    teacher = _wrapped(_network(6, 5, seed=1).requires_grad_(False).eval(), stage)
    student = _wrapped(_network(6, 5), stage)
    update, losses = _updating(student, [_adamw(student)], with_train_step), []
    for step in range(NUM_STEPS):
        inputs, _ = _inputs(step)
        with _around(stage):
            with torch.no_grad():
                target = teacher(inputs).float().softmax(-1)
            loss = functional.cross_entropy(student(inputs), target)
        update(loss)
        losses.append(loss.item())
    return losses, [full_parameters(student)]


def _gan(stage, with_train_step):
    """The generator's loss runs through the discriminator, and leaves gradients on it."""
    generator, discriminator = (_wrapped(each, stage) for each in (_network(4, 6), _network(6, 1, seed=1)))
    optimizers = [_adamw(generator), _adamw(discriminator)]
    updates = [
        _updating(model, [optimizer], with_train_step)
        for model, optimizer in zip((generator, discriminator), optimizers, strict=True)
    ]
    losses = []
    for step in range(NUM_STEPS):
        images, _ = _inputs(step)
        noise = images[:, :4]
        with _around(stage):
            fooled = functional.softplus(-discriminator(generator(noise)).float()).mean()
        updates[0](fooled)
        discriminator.zero_grad()
        with _around(stage):
            with torch.no_grad():
                fakes = generator(noise)
            scores = discriminator(torch.cat([fakes.float(), images]))
            labels = torch.cat([torch.zeros(8, 1), torch.ones(8, 1)])
            loss = functional.binary_cross_entropy_with_logits(scores, labels)
        updates[1](loss)
        losses += [fooled.item(), loss.item()]
    return losses, [full_parameters(generator), full_parameters(discriminator)]


LOOPS = {"one loss": _one_loss, "a teacher": _teacher, "a GAN": _gan}


def _differences(loop):
    """{(stage, with TrainStep): what differs from one process}."""
    expected, parameters = LOOPS[loop](None, False)
    found = {}
    for stage, with_train_step in ((0, False), (3, True)):
        losses, ours = LOOPS[loop](stage, with_train_step)
        differing = [name for pair in zip(ours, parameters, strict=True) for name in same_bits(*pair)]
        found[stage, with_train_step] = differing, losses == expected
    return found


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_several_models_has_the_bits_of_one_process(ranks2, loop):
    for found in ranks2.run(_differences, loop):
        assert found == dict.fromkeys(found, ([], True))


def _two_train_steps():
    """One loss of two models, each with a `TrainStep`."""
    models = [_wrapped(each, 3) for each in (_network(6, 8), _network(8, 5))]
    first, second = (zeroamp.TrainStep(model, _adamw(model)) for model in models)
    inputs, labels = _inputs(0)
    second.backward(functional.cross_entropy(models[1](models[0](inputs)), labels))
    second.step()
    says = r"of another model left them.*wrap_model\(nn.Sequential\(a, b\), config\).*TrainStep\(both, \["
    with pytest.raises(zeroamp.StepError, match=says):
        first.step()
    first.zero_grad()
    with pytest.raises(zeroamp.StepError, match="without a backward since the last step"):
        first.step()


def test_two_train_steps_of_one_loss_name_what_to_write(ranks2):
    ranks2.run(_two_train_steps)
