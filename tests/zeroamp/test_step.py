"""`TrainStep`: what it refuses, and what a plain loop may do."""

import pytest
import torch

import zeroamp
from tests import reference
from tests.models import batch, build, loss_of
from tests.ranks import RankError
from tests.training import config, full_parameters, same_bits, train, wrapped

NAME = "llama_tied"


def _plain_loop(cfg, num_steps):
    model = wrapped(NAME, cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for index in range(num_steps):
        loss_of(model, batch(NAME, 2 * index + torch.distributed.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_loop_trains_right_where_there_is_nothing_to_leave_out(ranks2, stage):
    parameters = ranks2.run(_plain_loop, config(stage), 3)[0]
    assert same_bits(parameters, reference.train(NAME, world_size=2, num_steps=3)[2]) == []


@pytest.mark.parametrize(
    ("options", "key"),
    [({"accumulation": 2}, "gradient_accumulation_steps 2"), ({"clip": 1.0}, "gradient_clipping 1.0")],
)
def test_a_plain_backward_is_refused_where_the_config_asks_for_more(ranks2, options, key):
    with pytest.raises(RankError, match=f"StepError: backward: found loss.backward\\(\\) with {key}"):
        ranks2.run(_plain_loop, config(3, **options), 1)


def _evaluate(model, name):
    model.eval()
    with torch.no_grad():
        loss_of(model, batch(name, 999))
    model.train()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_evaluation_between_backward_and_step_changes_nothing(ranks2, stage):
    cfg = config(stage, accumulation=2)
    with_evaluation, without = (ranks2.run(_train_with, cfg, evaluates)[0] for evaluates in (True, False))
    assert with_evaluation[:2] == without[:2]
    assert same_bits(with_evaluation[2], without[2]) == []


def _train_with(cfg, evaluates):
    return train(NAME, cfg, 4, between=_evaluate if evaluates else None)


def _misuse(how):
    model = wrapped(NAME, config(2))
    if how == "foreign optimizer":
        return zeroamp.TrainStep(model, torch.optim.SGD(build(NAME).parameters(), lr=0.1))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = loss_of(model, batch(NAME, 0))
    if how == "step first":
        return step.step()
    if how == "vector loss":
        return step.backward(torch.stack([loss, loss]))
    step.backward(loss)
    return step.backward(loss)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("foreign optimizer", "Build the optimizer from model.parameters\\(\\) after wrap_model"),
        ("step first", "TrainStep.step: found no backward since the last one"),
        ("vector loss", "TrainStep.backward: found a loss of shape \\(2,\\); valid: a scalar"),
        ("backward twice", "TrainStep.backward: found no step\\(\\) since the last one"),
    ],
)
def test_misuse_is_a_named_error_on_all_ranks(ranks2, how, text):
    with pytest.raises(RankError, match=f"StepError: .*{text}"):
        ranks2.run(_misuse, how)


def _schedule():
    model = wrapped(NAME, config(3, accumulation=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    step = zeroamp.TrainStep(model, optimizer, scheduler)
    rates, reports = [], []
    for index in range(6):
        step.backward(loss_of(model, batch(NAME, index)))
        reports.append(step.step())
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, [report and (report.step, report.skipped, report.loss_scale) for report in reports]


def test_the_scheduler_and_the_count_move_once_per_window(ranks2):
    rates, reports = ranks2.run(_schedule)[0]
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert reports == [None, (1, False, 1.0), None, (2, False, 1.0), None, (3, False, 1.0)]


def _gradients_left():
    model = wrapped(NAME, config(1))
    only_head = [model.get_parameter("embed.weight")]
    step = zeroamp.TrainStep(model, torch.optim.SGD(only_head, lr=0.1))
    step.backward(loss_of(model, batch(NAME, 0)))
    step.step()
    return [fqn for fqn, parameter in model.named_parameters() if parameter.grad is not None]


def test_gradients_that_the_optimizer_does_not_hold_are_dropped_too(ranks2):
    assert ranks2.run(_gradients_left)[0] == []
