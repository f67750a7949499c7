"""A loss that the caller computes from the model's output: exact under `train.autocast()`, warned of without."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import Llama, batch
from tests.processes.training import config, full_parameters, policy, same_bits

NUM_STEPS = 3


class Logits(Llama):
    def forward(self, tokens):
        return self.logits(tokens)


def _loss(logits, tokens):
    """A product with the logits, which autocast runs in bf16, then a log-softmax, which it runs in fp32."""
    logits = logits @ torch.eye(logits.shape[-1])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _one_process(num_ranks):
    """Plain autocast around forward and loss: losses[step][rank], and the parameters."""
    torch.manual_seed(0)
    model = Logits(tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        gradients = []
        losses.append([])
        for rank in range(num_ranks):
            tokens = batch("llama_untied", step * num_ranks + rank)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = _loss(model(tokens), tokens)
            losses[-1].append(float(loss.detach()))
            gradients.append(torch.autograd.grad(loss.float(), list(model.parameters())))
        for parameter, of_ranks in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = sum(of_ranks[1:], of_ranks[0]) / num_ranks
        optimizer.step()
    return losses, {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


def _trained(stage, is_inside_autocast, options):
    torch.manual_seed(0)
    model = zeroamp.wrap_model(Logits(tied=False), policy(config(stage, **options)))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    with log_lines(logging.INFO) as lines:
        for step in range(NUM_STEPS):
            tokens = batch("llama_untied", step * dist.get_world_size() + dist.get_rank())
            logits = model(tokens)
            if is_inside_autocast:
                with train.autocast():
                    loss = _loss(logits, tokens)
            else:
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            losses.append(float(loss.detach()))
            train.backward(loss)
            train.step()
    return losses, full_parameters(model), [line for line in lines if "TrainStep.backward" in line]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_under_train_autocast_it_has_the_bits_of_one_process(ranks2, stage):
    expected, parameters = _one_process(2)
    for rank, (losses, ours, warnings) in enumerate(ranks2.run(_trained, stage, True, {})):
        assert losses == [of_ranks[rank] for of_ranks in expected]
        assert same_bits(ours, parameters) == []
        assert warnings == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "with train.autocast():`, or, if it was there already, from logits.float()"),
        ({"dtype": None, "bf16": {"enabled": True}}, "Compute it from logits.float()"),
    ],
    ids=["autocast", "bf16"],
)
def test_a_low_precision_loss_is_warned_of_once_with_the_remedy(ranks2, options, text):
    (*_, warnings), (*_, of_second_rank) = ranks2.run(_trained, 3, False, options)
    assert len(warnings) == 1
    assert "bf16" in warnings[0]
    assert text in warnings[0]
    assert of_second_rank == []
