"""`TrainStep.update(optimizers)` and `update_part`: some of several optimizers step."""

import pytest
import torch

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from zeroamp.integrations.loop_driver import update_part
from zeroamp.training.step import driver_of


def _train(end):
    """Take two optimizer steps of two optimizers, ended by `end(train)`. Returns full parameters before and after."""
    model = wrapped("llama_tied", config(2))
    parameters = list(model.parameters())
    optimizers = [
        torch.optim.AdamW(parameters[:2], lr=0.1),
        torch.optim.SGD(parameters[2:], lr=0.1),
    ]
    train = zeroamp.TrainStep(model, optimizers)
    before = full_parameters(model)
    for index in range(2):
        train.backward(loss_of(model, batch("llama_tied", index)))
        train.clip_grad_norm()
        end(train)
    return before, full_parameters(model), train.num_steps


def _ends():
    def one_by_one(train):
        update_part(driver_of(train), train.optimizers[0])
        train.update(train.optimizers[1:])

    def first_only(train):
        update_part(driver_of(train), train.optimizers[0])
        train.update([])

    whole, parts, first = _train(lambda train: train.update()), _train(one_by_one), _train(first_only)
    changed = same_bits(first[1], first[0])
    with pytest.raises(zeroamp.StepError, match="not one of this TrainStep"):
        _train(lambda train: train.update([torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)]))
    return same_bits(parts[1], whole[1]), changed == list(first[0])[:2], [whole[2], parts[2], first[2]]


def test_optimizers_that_step_one_by_one_give_the_bits_of_one_update(ranks2):
    [(differing, is_first_only, counts), _] = ranks2.run(_ends)
    assert differing == []
    assert is_first_only
    assert counts == [2, 2, 2]
