"""What a session shows of an object: one line."""

import re

import pytest
import torch

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from tests.zeroamp.dry_run.plans import plan

NAME = "llama_tied"
FP16 = {"dtype": None, "fp16": {"enabled": True, "initial_scale_power": 4}}


def _texts(options):
    """Of a TrainStep before and after two steps, of their reports, of the ledger and of its verification."""
    model = wrapped(NAME, config(**options))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    texts = [repr(train)]
    for _ in range(4):
        train.backward(loss_of(model, batch(NAME, 0)))
        if report := train.step():
            texts.append(repr(report))
    ledger = zeroamp.explain(model)
    verified = ledger.verify(model, batch(NAME, 0), loss_fn=lambda output: output.float().mean())
    return [*texts, repr(train), repr(ledger), repr(verified)]


@pytest.mark.parametrize(
    ("options", "words", "loss_scale"),
    [
        ({"stage": 0}, "mode autocast, ZeRO stage 0, all-gathered/reduced in bf16/fp32 and fp32/fp32", 1),
        ({"stage": 2, **FP16}, "mode fp16, ZeRO stage 2, all-gathered/reduced in fp16/fp16", 16),
    ],
    ids=["autocast", "fp16"],
)
def test_each_object_of_a_run_is_one_line(ranks2, options, words, loss_scale):
    before, *reports, after, ledger, verified = ranks2.run(_texts, {"accumulation": 2, **options})[0]
    for text, num_steps in ((before, 0), (after, 2)):
        counts = f"micro-batches per step: 2, steps: {num_steps}, skipped: 0, loss scale {loss_scale}"
        assert text == f"TrainStep({words}, AdamW, {counts})"
    end = ", loss scale 16" if loss_scale == 16 else ""
    for step, text in enumerate(reports, 1):
        assert re.fullmatch(rf"StepReport\(step {step}: loss [\d.]+, gradient norm [\d.]+, lr 0.01{end}\)", text), text
    title = words.partition(", all")[0]
    assert re.fullmatch(rf"Ledger\({title}, 3 units below the root, .* 33,600 parameters.*\)", ledger)
    title = "23 parameters, 2 micro-batches: every dtype is the expected one"
    assert verified == f"Verification({title}; collectives and their bytes are as planned)"


def test_a_plan_is_one_line():
    assert repr(plan(stages=(0, 3))) == (
        "RunPlan(67,168 parameters, mode autocast, 8 ranks, 1 x batch 2 x 12 per rank, without activation "
        "checkpointing, GPU (0.0 GiB), 95.6% of the trainable elements in bf16)"
    )
