"""Parameters that get other memory between two steps (`model.to`): training goes on with the same bits."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but

NAME = "llama_tied"
MOVES = {
    "nothing": lambda _: None,
    "the model": lambda model: model._apply(torch.clone),  # what `.to(device)` calls
    "a block, whose norms are in the group of the whole model": lambda model: model.blocks[1]._apply(torch.clone),
}


def _train(stage, move):
    model = wrapped(NAME, config(stage))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for index in range(4):
        train.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
        train.step()
        if index == 1:
            MOVES[move](model)
    return full_parameters(model)


def _all(stage):
    return [_train(stage, move) for move in MOVES]


@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_moved_parameters_are_all_gathered_from_where_they_are(ranks2, stage):
    for expected, *found in ranks2.run(_all, stage):
        for parameters in found:
            assert same_bits(parameters, expected) == []
