"""Mistakes of half-converted loops: an error or the right result, as the table of docs/from-fsdp2.md has it."""

import re
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.launch import ROOT
from tests.processes.training import config, full_parameters, same_bits

NAME = "encoder"
NUM_STEPS = 2  # what is left after the first one is found in the second
NUM_MICRO = 2
STAGES = ((0, 3), (1, 2))  # one of the two in the fast tests, by turns
RIGHT = "right"
PLAIN, WITH = "plain loop", "with `TrainStep`"


@dataclass(frozen=True)
class Mistake:
    """What a loop does."""

    text: str
    """Its cell of the table."""
    loop: str
    """`PLAIN` or `WITH`."""
    calls: dict = field(default_factory=dict)
    """Place in the loop -> what is called there."""
    expected: dict = field(default_factory=dict)
    """Options of the loop without the mistake that has the same result."""
    remedy: str = ""
    """Pattern of the text of the error at stage 2 or 3."""


def _scheduled(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def _forward(run):
    loss_of(run.model, batch(NAME, 999))


def _zero_grad(run):
    run.optimizer.zero_grad()


def _zero_in_place(run):
    run.optimizer.zero_grad(set_to_none=False)


def _step(run):
    run.optimizer.step()


def _step_scheduler(run):
    run.scheduler.step()


def _leave_unreduced(run):
    run.model.set_requires_gradient_sync(False)


BUILT_BEFORE = "the optimizer was built before `wrap_model`"
BUILT_IN_BETWEEN = "the optimizer was built between a forward and its backward"
MISTAKES = {
    "built before": Mistake(
        BUILT_BEFORE,
        PLAIN,
        {"build": "before wrapping"},
        remedy=r"position as it was before wrap_model.*Build the optimizer from model.parameters\(\) after",
    ),
    "built before, TrainStep": Mistake(BUILT_BEFORE, WITH, {"build": "before wrapping"}),
    "built in between": Mistake(
        BUILT_IN_BETWEEN,
        PLAIN,
        {"build": "after a forward"},
        remedy="an unsharded parameter.* before the first forward",
    ),
    "built in between, TrainStep": Mistake(BUILT_IN_BETWEEN, WITH, {"build": "after a forward"}),
    "forward": Mistake("a forward with gradients runs before `optimizer.step()`", PLAIN, {"before the step": _forward}),
    "forward, TrainStep": Mistake(
        "a forward with gradients runs before `train.step()`", WITH, {"before the step": _forward}
    ),
    "not reduced": Mistake(
        "the last backward runs with `set_requires_gradient_sync(False)`",
        PLAIN,
        {"before a backward": _leave_unreduced},
        remedy=r"Call model.set_requires_gradient_sync\(True\) before the last backward",
    ),
    "zero_grad": Mistake(
        "`optimizer.zero_grad()` between micro-batches", PLAIN, {"between": _zero_grad}, {"last_only": True}
    ),
    "zero_grad, TrainStep": Mistake(
        "`optimizer.zero_grad()` between micro-batches",
        WITH,
        {"between": _zero_grad},
        remedy="between two micro-batches.*remove the call",
    ),
    "zeros, TrainStep": Mistake(
        "`optimizer.zero_grad(set_to_none=False)` between micro-batches", WITH, {"between": _zero_in_place}
    ),
    "step before": Mistake(
        "`optimizer.step()` before `train.step()`",
        WITH,
        {"before the step": _step},
        remedy="AdamW.step .*updated twice. Remove the calls of optimizer.step",
    ),
    "step between": Mistake("`optimizer.step()` between micro-batches", WITH, {"between": _step}),
    "step after": Mistake("`optimizer.step()` after `train.step()`", WITH, {"after the step": _step}),
    "scheduler": Mistake(
        "`scheduler.step()` of a scheduler that `TrainStep` steps",
        WITH,
        {"after the step": _step_scheduler},
        remedy="ExponentialLR.step .*last_epoch is 2, and TrainStep left it at 1. Remove the call",
    ),
}


class _Run:
    """A loop of two micro-batches per optimizer step, with calls that should not be there."""

    def __init__(self, stage, loop, calls=None, *, last_only=False):
        self.last_only = last_only
        self.calls = calls or {}
        steps = NUM_MICRO if loop == WITH else 1
        model, policy = build(NAME), zeroamp.policy_from_config(config(stage, accumulation=steps, comm="fp32"))
        where = self.calls.get("build", "after wrapping")
        if where == "before wrapping":
            self.optimizer = _optimizer(model)
        self.model = zeroamp.wrap_model(model, policy)
        if where == "after a forward":
            loss = loss_of(self.model, batch(NAME, 999))
            self.optimizer = _optimizer(self.model)
            del loss
        if where == "after wrapping":
            self.optimizer = _optimizer(self.model)
        self.scheduler = _scheduled(self.optimizer)
        self.train = zeroamp.TrainStep(self.model, self.optimizer, self.scheduler) if loop == WITH else None

    def call(self, place):
        """Make the call that should not be there."""
        if place in self.calls:
            self.calls[place](self)

    def step(self, index):
        """Run one optimizer step."""
        for micro in range(NUM_MICRO):
            if micro > 0:
                self.call("between")
            if micro == 0 and self.last_only:
                continue
            self.call("before a backward")
            inputs = batch(NAME, (index * NUM_MICRO + micro) * dist.get_world_size() + dist.get_rank())
            loss = loss_of(self.model, inputs)
            if self.train is None:
                (loss / NUM_MICRO).backward()
            else:
                self.train.backward(loss)
                if micro + 1 < NUM_MICRO:
                    self.train.step()
        self.call("before the step")
        if self.train is None:
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        else:
            assert self.train.step() is not None
        self.call("after the step")


def _optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _parameters(*args, **options):
    run = _Run(*args, **options)
    for index in range(NUM_STEPS):
        run.step(index)
    return full_parameters(run.model)


_expected = cache(_parameters)


def _outcome(stage, name):
    mistake = MISTAKES[name]
    try:
        parameters = _parameters(stage, mistake.loop, mistake.calls)
    except zeroamp.StepError as error:
        return f"StepError: {error}"
    if same_bits(parameters, _expected(stage, mistake.loop, **mistake.expected)) != []:
        return "WRONG"
    return "as in plain torch" if mistake.expected else RIGHT


def _outcomes(name, stages):
    return [_outcome(stage, name) for stage in stages]


def _table():
    """The rows of the table in the docs: its cells."""
    _, _, rest = (ROOT / "docs" / "from-fsdp2.md").read_text().partition("<!-- mistakes -->\n")
    lines = rest.partition("<!-- end: mistakes -->")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(
    ("name", "stages"),
    [(name, STAGES[place % 2]) for place, name in enumerate(MISTAKES)]
    + [pytest.param(name, STAGES[(place + 1) % 2], marks=pytest.mark.slow) for place, name in enumerate(MISTAKES)],
)
def test_a_mistake_is_an_error_or_right(ranks2, name, stages):
    """A mistake is an error or right, at stages 0 and 1 and at stages 2 and 3, as the docs have it."""
    by_rank = ranks2.run(_outcomes, name, stages)
    assert by_rank[0] == by_rank[1]
    row = [MISTAKES[name].text, MISTAKES[name].loop, *(each.partition(":")[0] for each in by_rank[0])]
    assert row in _table(), f"docs/from-fsdp2.md needs the row: | {' | '.join(row)} |\n{by_rank[0]}"
    assert "WRONG" not in row
    assert re.search(MISTAKES[name].remedy, by_rank[0][-1]), by_rank[0][-1]


def test_the_table_has_no_other_rows():
    assert [row[:2] for row in _table()] == [[each.text, each.loop] for each in MISTAKES.values()]
