"""A trainable parameter that FSDP2 does not shard is refused by name: each rank would train its own copy."""

import re

import pytest
import torch
from torch import nn

import zeroamp
from tests.processes.training import SmallTraining, config


def _change(model, how):
    if how == "added":
        model.blocks[1].adapter = nn.Linear(4, 4, bias=False)
    elif how == "replaced":  # as resize_token_embeddings does
        model.norm.weight = nn.Parameter(torch.ones_like(model.norm.weight))
    elif how == "frozen":
        model.adapter = nn.Linear(4, 4).requires_grad_(False)


def _refused(how, when, folder):
    training = SmallTraining(config(3))
    model, optimizer = training.model, training.optimizer
    if when == "before":
        _change(model, how)
        training.train = zeroamp.TrainStep(model, optimizer)
    training.step()
    if when == "after":
        _change(model, how)
    zeroamp.save_checkpoint(folder, model, training.train)


@pytest.mark.parametrize(
    ("how", "when", "fqn"),
    [
        ("added", "before", "blocks.1.adapter.weight"),
        ("added", "after", "blocks.1.adapter.weight"),
        ("replaced", "before", "norm.weight"),
    ],
)
def test_a_parameter_that_is_no_shard_is_refused_by_the_step_and_by_a_save(ranks2, tmp_path, how, fqn, when):
    with pytest.raises(AssertionError, match=rf"StepError: .*{re.escape(fqn)} .*before wrap_model"):
        ranks2.run(_refused, how, when, str(tmp_path))


def test_a_frozen_one_is_not_trained_and_stays(ranks2, tmp_path):
    ranks2.run(_refused, "frozen", "before", str(tmp_path))
