"""`TrainStep`: what it refuses, and what a loop around it may do."""

import dataclasses
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.ranks import RankError
from tests.processes.training import SmallTraining, check_errors, config, errors_of, same_bits, wrapped
from zeroamp.wrapping.step_state import StepPhase, StepState

NAME = "two_blocks"


def _vector(training):
    training.train.backward(torch.stack([training.loss(), training.loss(1)]))


def _twice(training):
    training.backward()
    training.backward()


def _without_gradient(training):
    training.train.backward(torch.ones((), requires_grad=True) * 2)
    try:
        training.train.step()
    finally:
        assert training.step().step == 1, "the next optimizer step begins after one that raised"


def _detached(training):
    try:
        training.train.backward(torch.tensor(1.0))
    finally:
        assert training.step().step == 1, "nothing ran before the error"


def _plateau(training):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer)
    zeroamp.TrainStep(training.model, training.optimizer, scheduler)


def _grown_optimizer(training):
    training.step()
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    training.backward()


def _added(training):
    training.model.blocks[1].adapter = torch.nn.Linear(4, 4, bias=False)
    zeroamp.TrainStep(training.model, training.optimizer)


def _replaced(training):
    """As resize_token_embeddings does."""
    training.model.norm.weight = torch.nn.Parameter(torch.ones_like(training.model.norm.weight))
    zeroamp.TrainStep(training.model, training.optimizer)


def _added_after_a_step(training):
    training.model.adapter = torch.nn.Linear(4, 4).requires_grad_(False)  # which is not trained, and stays
    zeroamp.TrainStep(training.model, training.optimizer)
    training.step()
    training.model.adapter.requires_grad_(True)
    zeroamp.save_checkpoint(Path(tempfile.gettempdir()) / "never-written", training.model, training.train)


def _max_norm(value):
    def clip(training):
        training.backward()
        training.train.clip_grad_norm(value)

    return clip


def _callbacks(training):
    training.train.callbacks += [zeroamp.Callback()]
    assert len(training.train.callbacks) == 1
    training.train.callbacks = [zeroamp.Callback()]


def _two(end, start):
    return lambda parameters: [torch.optim.SGD(part, lr=0.1) for part in (parameters[:end], parameters[start:])]


def _scheduler_of_one(optimizers):
    return torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda _step: 1.0)


def _of_another_model(_parameters):
    return torch.optim.SGD(build(NAME).parameters(), lr=0.1)


MISUSES = {
    "no gradient": (_without_gradient, "TrainStep.step .*no gradient on any parameter"),
    "detached loss": (_detached, "TrainStep.backward .*needs no gradient"),
    "vector loss": (_vector, r"TrainStep.backward .*scalar.*shape \(2,\)"),
    "step first": (lambda training: training.train.step(), "TrainStep.step .*without a backward.*Call backward"),
    "backward twice": (_twice, r"TrainStep.backward .*twice.*Call step\(\)"),
    "a parameter that an optimizer gets later": (
        _grown_optimizer,
        r"param_groups\[1\] has an unsharded .*not one of the wrapped model",
    ),
    "a parameter that is no shard": (_added, r"blocks\.1\.adapter\.weight .*before wrap_model"),
    "a replaced parameter": (_replaced, r"norm\.weight .*before wrap_model"),
    "a save of a parameter that is no shard": (_added_after_a_step, r"adapter\.weight .*before wrap_model"),
    "a scheduler with a metric": (_plateau, "ReduceLROnPlateau, whose step needs a metric.*evaluation"),
    "norm as text": (_max_norm("1"), "max_norm must be a number >= 0, or None, but is '1'"),
    "norm nan": (_max_norm(float("nan")), "max_norm must be a number >= 0, or None, but is nan"),
    "callbacks set": (_callbacks, r"TrainStep.callbacks was set.* train.callbacks.append\(callback\)"),
}
"""Name -> what is called on a training, and the text of its error."""
UNUSABLE = {
    "foreign optimizer": ((_of_another_model,), r"Build the optimizer from model.parameters\(\) after wrap_model"),
    "no optimizer": ((lambda _: [],), "no optimizer"),
    "a parameter in two optimizers": ((_two(2, 1),), "one optimizer"),
    "no optimizer at all": ((lambda _: None,), r"optimizer=\) must be an optimizer of torch, .*but is None"),
    "the class of an optimizer": ((lambda _: torch.optim.AdamW,), "but is the class AdamW. Build one"),
    "the name of a scheduler": ((_two(2, 2), lambda _: "cosine"), r"scheduler=\) must be .* but is 'cosine'. Build"),
    "too few schedulers": ((_two(2, 2), _scheduler_of_one), r"scheduler=\) .*None"),
}
"""Name -> what makes the optimizer and the scheduler, and the text of the error."""


def _misuses():
    def run(action):
        action(SmallTraining(config(3)))

    calls = {name: partial(run, action) for name, (action, _) in MISUSES.items()}
    makes = {name: partial(SmallTraining, config(3), *makers) for name, (makers, _) in UNUSABLE.items()}
    return errors_of({**calls, **makes})


def test_misuse_is_a_named_error_on_all_ranks(ranks2):
    patterns = {name: f"^StepError: .*{text}" for name, (_, text) in {**MISUSES, **UNUSABLE}.items()}
    check_errors(ranks2.run(_misuses), patterns)


@dataclasses.dataclass
class Output:
    nested: dict


def _plain_backward(how, options):
    model = wrapped("two_blocks_untied", config(3, **options))
    forward = model.forward
    if how == "registered method":
        zeroamp.register_forward_method(model, "logits")
        return model.logits(batch(NAME, 0)).sum().backward()
    if how == "nested output":
        model.forward = lambda tokens: Output({"loss": [forward(tokens)]})
        return model(batch(NAME, 0)).nested["loss"][0].backward()
    loss = loss_of(model, batch(NAME, 0))
    return loss.backward(inputs=[model.head.weight] if how == "for some parameters" else None)


PLAIN = {
    "accumulation": ({"accumulation": 2}, "gradient_accumulation_steps 2.*TrainStep"),
    "clipping": ({"clip": 1.0}, "gradient_clipping 1.0.*TrainStep"),
    "float16": ({"dtype": "float16"}, "float16, which scales the loss"),
    "skipped steps": ({"zeroamp": {"skip_nonfinite_steps": True}}, "skip_nonfinite_steps True"),
    "overflows": ({"dtype": None, "bf16": {"enabled": True, "check_grad_overflow": True}}, "check_grad_overflow True"),
    "state in host memory": ({"zeroamp": {"offload_between_steps": ["optimizer"]}}, "zeroamp.offload_between_steps"),
    "for some parameters": ({"clip": 1.0}, "gradient_clipping 1.0.*TrainStep"),
    "registered method": ({"clip": 1.0}, "gradient_clipping 1.0.*TrainStep"),
    "nested output": ({"clip": 1.0}, "gradient_clipping 1.0.*TrainStep"),
}


def _plain_backwards():
    return errors_of({name: partial(_plain_backward, name, options) for name, (options, _) in PLAIN.items()})


def test_a_plain_backward_is_refused_where_the_config_asks_for_more(ranks2):
    patterns = {name: f"^StepError: loss.backward.* {text}" for name, (_, text) in PLAIN.items()}
    check_errors(ranks2.run(_plain_backwards), patterns)


def _after_refusal(refused_first):
    training = SmallTraining(config(2, accumulation=2))
    if refused_first:
        with pytest.raises(zeroamp.StepError):
            training.loss().backward()
    reports = []
    for index in range(4):
        loss = training.loss(index)
        training.train.backward(loss.reshape(1) if refused_first else loss)  # a loss of one element is a scalar
        reports.append(training.train.step())
    return [report.grad_norm for report in reports if report is not None], training.parameters()


def test_training_goes_on_after_a_refused_backward(ranks2):
    refused, plain = (ranks2.run(_after_refusal, first)[0] for first in (True, False))
    assert refused[0] == plain[0]
    assert same_bits(refused[1], plain[1]) == []


class FailsOnce(torch.optim.SGD):
    failed = False

    def step(self, closure=None):
        if not self.failed:
            self.failed = True
            raise MemoryError
        return super().step(closure)


def _raise(_gradient):
    raise MemoryError


def _raise_in_backward(_module, _args, out):
    out.register_hook(_raise)


def _after_a_failure(where, then):
    training = SmallTraining(config(3), lambda parameters: FailsOnce(parameters, lr=0.1))
    model, train = training.model, training.train
    if where == "backward":
        model.blocks[1].register_forward_hook(_raise_in_backward)
    with pytest.raises(MemoryError):
        training.step()
    if then == "backward":
        return train.backward(torch.ones((), requires_grad=True) * 1)
    return getattr(train, then)()


@pytest.mark.parametrize(
    ("where", "then"),
    [
        ("optimizer.step", "backward"),
        ("optimizer.step", "zero_grad"),
        ("backward", "step"),
    ],
)
def test_training_does_not_go_on_after_a_failure(ranks2, where, then):
    with pytest.raises(
        RankError, match=f"StepError: TrainStep.{then} .*failure in {where} .MemoryError: .*last checkpoint"
    ):
        ranks2.run(_after_a_failure, where, then)


def test_a_failure_outlives_the_end_of_its_step():
    state = StepState()
    state.fail("backward")
    state.reset()
    assert state.phase is StepPhase.FAILED


def _gradients_left():
    training = SmallTraining(config(1), lambda parameters: torch.optim.SGD(parameters[:1], lr=0.1))
    training.step()
    return [fqn for fqn, parameter in training.model.named_parameters() if parameter.grad is not None]


def test_gradients_that_the_optimizer_does_not_hold_are_dropped_too(ranks2):
    assert ranks2.run(_gradients_left) == [[], []]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "step 3: loss 2.5000, gradient norm 1.234"),
        ({"lr_values": (1e-3, torch.tensor(3e-4))}, "step 3: loss 2.5000, gradient norm 1.234, lr 0.001 / 0.0003"),
        (
            {"loss_scale": 65536.0, "skipped": True, "num_skipped": 2},
            "step 3: loss 2.5000, gradient norm 1.234, loss scale 65,536, skipped (2 so far)",
        ),
    ],
)
def test_a_report_prints_its_numbers_in_a_line(more, text):
    numbers = {"loss_tensor": torch.tensor(2.5, dtype=torch.float64), "grad_norm_tensor": torch.tensor(1.2344)}
    assert str(zeroamp.StepReport(**{"step": 3, "loss_scale": 1.0, "skipped": False, **numbers, **more})) == text
