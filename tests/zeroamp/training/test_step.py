"""`TrainStep`: what it refuses, and what a plain loop may do."""

import dataclasses

import pytest
import torch

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.ranks import RankError
from tests.processes.training import check_same_run, config, full_parameters, same_bits, train, wrapped
from tests.selection import slow_but

NAME = "llama_tied"


def _plain_loop(cfg, num_steps):
    model = wrapped(NAME, cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for index in range(num_steps):
        loss_of(model, batch(NAME, 2 * index + torch.distributed.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_a_plain_loop_trains_right_where_there_is_nothing_to_leave_out(ranks2, stage):
    parameters = ranks2.run(_plain_loop, config(stage), 3)[0]
    assert same_bits(parameters, one_process.train(NAME, world_size=2, num_steps=3)[2]) == []


@pytest.mark.parametrize(
    ("options", "key"),
    [({"accumulation": 2}, "gradient_accumulation_steps 2"), ({"clip": 1.0}, "gradient_clipping 1.0")],
)
def test_a_plain_backward_is_refused_where_the_config_asks_for_more(ranks2, options, key):
    with pytest.raises(RankError, match=f"StepError: loss.backward.* {key}.*TrainStep"):
        ranks2.run(_plain_loop, config(3, **options), 1)


def _evaluate(model, name):
    model.eval()
    with torch.no_grad():
        loss_of(model, batch(name, 999))
    model.train()


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_an_evaluation_between_backward_and_step_changes_nothing(ranks2, stage):
    cfg = config(stage, accumulation=2)
    with_evaluation, without = (ranks2.run(_train_with, cfg, evaluates)[0] for evaluates in (True, False))
    check_same_run(with_evaluation, without)


def _train_with(cfg, evaluates):
    return train(NAME, cfg, 4, between=_evaluate if evaluates else None)


def _misuse(how):
    model = wrapped(NAME, config(2))
    if how == "foreign optimizer":
        return zeroamp.TrainStep(model, torch.optim.SGD(build(NAME).parameters(), lr=0.1))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "plateau":
        optimizer = step.optimizers[0]
        return zeroamp.TrainStep(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    loss = loss_of(model, batch(NAME, 0))
    if how == "no gradient":
        step.backward(torch.ones((), requires_grad=True) * 2)
        return step.step()
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
        ("plateau", "ReduceLROnPlateau, whose step needs a metric"),
        ("no gradient", "TrainStep.step .*no gradient on any parameter"),
        ("step first", "TrainStep.step .*without a backward.*Call backward"),
        ("vector loss", "TrainStep.backward .*scalar.*shape \\(2,\\)"),
        ("backward twice", "TrainStep.backward .*twice.*Call step\\(\\)"),
    ],
)
def test_misuse_is_a_named_error_on_all_ranks(ranks2, how, text):
    with pytest.raises(RankError, match=f"StepError: .*{text}"):
        ranks2.run(_misuse, how)


def _after_refusal(refused_first):
    model = wrapped(NAME, config(2, accumulation=2))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if refused_first:
        with pytest.raises(zeroamp.StepError):
            loss_of(model, batch(NAME, 0)).backward()
    norms = []
    for index in range(4):
        step.backward(loss_of(model, batch(NAME, index)))
        if (report := step.step()) is not None:
            norms.append(report.grad_norm)
    return norms, full_parameters(model)


def test_training_goes_on_after_a_refused_backward(ranks2):
    (norms, parameters), (plain_norms, plain_parameters) = (
        ranks2.run(_after_refusal, first)[0] for first in (True, False)
    )
    assert norms == plain_norms
    assert same_bits(parameters, plain_parameters) == []


@dataclasses.dataclass
class Output:
    nested: dict


def _unusual_outputs(how):
    model = wrapped("llama_untied", config(3, clip=1.0))
    if how == "registered method":
        zeroamp.register_forward_method(model, "logits")
        return model.logits(batch(NAME, 0)).sum().backward()
    forward = model.forward
    model.forward = lambda tokens: Output({"loss": [forward(tokens)]})
    return model(batch(NAME, 0)).nested["loss"][0].backward()


@pytest.mark.parametrize("how", ["registered method", "dataclass"])
def test_the_guard_sees_registered_methods_and_nested_outputs(ranks2, how):
    with pytest.raises(RankError, match="StepError: loss.backward.* gradient_clipping 1.0.*TrainStep"):
        ranks2.run(_unusual_outputs, how)


def _plain_loop_with_evaluations(stage):
    model = wrapped(NAME, config(stage))
    _evaluate(model, NAME)  # before the optimizer is built
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for index in range(3):
        loss_of(model, batch(NAME, 2 * index + torch.distributed.get_rank())).backward()
        _evaluate(model, NAME)  # between backward and step
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_a_plain_loop_may_evaluate_anywhere(ranks2, stage):
    parameters = ranks2.run(_plain_loop_with_evaluations, stage)[0]
    assert same_bits(parameters, one_process.train(NAME, world_size=2, num_steps=3)[2]) == []


def _compiled_whole():
    model = wrapped(NAME, config(3))
    compiled = torch.compile(model, backend="aot_eager")
    step = zeroamp.TrainStep(compiled, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    losses = []
    for index in range(3):
        loss = compiled(batch(NAME, 2 * index + torch.distributed.get_rank()))
        losses.append(float(loss.detach()))
        step.backward(loss)
        step.step()
    return losses


@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole_trains(ranks2):
    losses, _, _ = one_process.train(NAME, world_size=2, num_steps=3)
    assert ranks2.run(_compiled_whole)[0] == [ranks[0][0] for ranks in losses]


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


def _after_a_step_without_gradients():
    model = wrapped(NAME, config(3))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.backward(torch.ones((), requires_grad=True) * 2)
    with pytest.raises(zeroamp.StepError):
        step.step()
    step.backward(loss_of(model, batch(NAME, 0)))
    return step.step().step


def test_the_next_window_begins_after_a_step_that_raised(ranks2):
    assert ranks2.run(_after_a_step_without_gradients)[0] == 1


class FailsOnce(torch.optim.SGD):
    failed = False

    def step(self, closure=None):
        if not self.failed:
            self.failed = True
            raise MemoryError
        return super().step(closure)


def _after_an_optimizer_that_raised(then):
    model = wrapped(NAME, config(3))
    step = zeroamp.TrainStep(model, FailsOnce(model.parameters(), lr=0.1))
    step.backward(loss_of(model, batch(NAME, 0)))
    with pytest.raises(MemoryError):
        step.step()
    return {
        "backward": lambda: step.backward(loss_of(model, batch(NAME, 0))),
        "step": step.step,
        "zero_grad": step.zero_grad,
    }[then]()


@pytest.mark.parametrize("then", ["backward", "step", "zero_grad"])
def test_training_does_not_go_on_after_an_optimizer_that_raised(ranks2, then):
    with pytest.raises(RankError, match="failure in optimizer.step .MemoryError: .*last checkpoint"):
        ranks2.run(_after_an_optimizer_that_raised, then)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError


def _after_a_backward_that_raised(then):
    model = wrapped(NAME, config(3))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: RaisesInBackward.apply(out))
    with pytest.raises(MemoryError):
        step.backward(loss_of(model, batch(NAME, 0)))
    handle.remove()
    return step.step() if then == "step" else step.backward(torch.ones((), requires_grad=True) * 1)


@pytest.mark.parametrize("then", ["step", "backward"])
def test_training_does_not_go_on_after_a_backward_that_raised(ranks2, then):
    with pytest.raises(RankError, match=f"StepError: TrainStep.{then} .*failure in backward .MemoryError"):
        ranks2.run(_after_a_backward_that_raised, then)


def _loss_of_one_element():
    model = wrapped(NAME, config(3))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = loss_of(model, batch(NAME, 0)).reshape(1)
    step.backward(loss)
    return step.step().loss == float(loss.detach())


def test_a_loss_of_one_element_is_a_scalar(ranks2):
    assert ranks2.run(_loss_of_one_element)[0]


def _gradients_left():
    model = wrapped(NAME, config(1))
    only_head = [model.get_parameter("embed.weight")]
    step = zeroamp.TrainStep(model, torch.optim.SGD(only_head, lr=0.1))
    step.backward(loss_of(model, batch(NAME, 0)))
    step.step()
    return [fqn for fqn, parameter in model.named_parameters() if parameter.grad is not None]


def test_gradients_that_the_optimizer_does_not_hold_are_dropped_too(ranks2):
    assert ranks2.run(_gradients_left)[0] == []


def _step_under_a_default_device():
    torch.manual_seed(0)
    model = zeroamp.wrap_model(torch.nn.Linear(4, 1), zeroamp.policy_from_config({"zero_optimization": {"stage": 3}}))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train.backward(model(torch.ones(2, 4)).mean())
    with torch.device("meta"):  # a CUDA device would get a blocking copy of each number
        report = train.step()
    return report.loss


def test_a_default_device_does_not_get_the_numbers_of_the_host(ranks2):
    first, second = ranks2.run(_step_under_a_default_device)
    assert first == second
