"""A loss that the caller computes from the model's output: exact under `train.autocast()`, warned of without."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import batch
from tests.oracles import one_process
from tests.processes.training import Run, SmallTraining, adamw, check_run, config

NAME = "llama_untied"
NUM_STEPS = 3


def _loss(model, tokens):
    """A product with the logits, which autocast runs in bf16, then a log-softmax, which it runs in fp32."""
    logits = model.logits(tokens)
    logits = logits @ torch.eye(logits.shape[-1])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _trained(stage, is_inside_autocast, options):
    """The run, and what is warned of."""
    training = SmallTraining(config(stage, **options), adamw, name=NAME)
    model, train = training.model, training.train
    zeroamp.register_forward_method(model, "logits")
    losses, reports = [], []
    with log_lines(logging.INFO) as lines:
        for step in range(NUM_STEPS):
            tokens = batch(NAME, step * dist.get_world_size() + dist.get_rank())
            if is_inside_autocast:
                with train.autocast():
                    loss = _loss(model, tokens)
            else:
                loss = F.cross_entropy(model.logits(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            losses.append([float(loss.detach())])
            train.backward(loss)
            reports.append(train.step())
    norms, means = [report.grad_norm for report in reports], [report.loss for report in reports]
    run = Run(losses=losses, norms=norms, parameters=training.parameters(), mean_losses=means)
    return run, [line for line in lines if "TrainStep.backward" in line]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_under_train_autocast_it_has_the_bits_of_one_process(ranks2, stage):
    oracle = one_process.train(NAME, world_size=2, num_steps=NUM_STEPS, loss_fn=_loss)
    for rank, (run, warnings) in enumerate(ranks2.run(_trained, stage, True, {})):
        check_run(run, rank, oracle)
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
    (_, warnings), (_, of_second_rank) = ranks2.run(_trained, 3, False, options)
    assert len(warnings) == 1
    assert "bf16" in warnings[0]
    assert text in warnings[0]
    assert of_second_rank == []
