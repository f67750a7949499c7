"""A trainable parameter that FSDP2 does not shard is refused by name: each rank would train its own copy."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.small import batch, hf_llama, loss_of
from tests.processes.training import config, wrapped

NAME = "llama_tied"


def _change(model, how):
    if how == "added":
        model.blocks[1].adapter = nn.Linear(4, 4, bias=False)
    elif how == "replaced":
        model.norm.weight = nn.Parameter(torch.ones_like(model.norm.weight))
    elif how == "frozen":
        model.adapter = nn.Linear(4, 4).requires_grad_(False)


def _refused(how, when, folder):
    model = wrapped(NAME, config(3))
    if when == "before":
        _change(model, how)
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train.backward(loss_of(model, batch(NAME, dist.get_rank())))
    train.step()
    if when == "after":
        _change(model, how)
    zeroamp.save_checkpoint(folder, model, train)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("how", "fqn"), [("added", "blocks.1.adapter.weight"), ("replaced", "norm.weight")])
def test_a_parameter_that_is_no_shard_is_refused_by_the_step_and_by_a_save(ranks2, tmp_path, how, fqn, when):
    with pytest.raises(AssertionError, match=rf"StepError: .*{re.escape(fqn)} .*wrap_model"):
        ranks2.run(_refused, how, when, str(tmp_path))


def test_a_frozen_one_is_not_trained_and_stays(ranks2, tmp_path):
    ranks2.run(_refused, "frozen", "before", str(tmp_path))


def _resized():
    model = zeroamp.wrap_model(hf_llama(tied=False), zeroamp.policy_from_config(config(3)))
    model.set_input_embeddings(nn.Embedding(100, 32))  # what resize_token_embeddings ends with
    zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_resized_embeddings_are_refused(ranks2):
    with pytest.raises(AssertionError, match=r"StepError: .*model.embed_tokens.weight .*before wrap_model"):
        ranks2.run(_resized)


def _added_to_the_optimizer():
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = zeroamp.TrainStep(model, optimizer)
    train.backward(loss_of(model, batch(NAME, dist.get_rank())))
    train.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    train.backward(loss_of(model, batch(NAME, dist.get_rank())))


def test_a_parameter_that_an_optimizer_gets_later_is_refused(ranks2):
    with pytest.raises(
        AssertionError, match=r"StepError: optimizer.param_groups\[1\] has an unsharded .*not one of the wrapped model"
    ):
        ranks2.run(_added_to_the_optimizer)
