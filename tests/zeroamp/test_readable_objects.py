"""What a session or a notebook shows of an object: one line, and tables as HTML."""

import re

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import Llama, batch, loss_of
from tests.processes.training import config, wrapped
from tests.zeroamp.dry_run.plans import plan

NAME = "llama_tied"
FP16 = {"dtype": None, "fp16": {"enabled": True, "initial_scale_power": 4}}


def _after_steps(options, num_steps):
    torch.manual_seed(0)
    model = wrapped(NAME, config(**options))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    texts = [repr(train)]
    for _ in range(num_steps):
        train.backward(loss_of(model, batch(NAME, 0)))
        if report := train.step():
            texts.append(repr(report))
    return [*texts, repr(train)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 0}, "mode autocast, ZeRO stage 0, all-gathered/reduced in bf16/fp32 and fp32/fp32"),
        ({"stage": 3}, "mode autocast, ZeRO stage 3, all-gathered/reduced in bf16/bf16 and fp32/fp32"),
        ({"stage": 2, **FP16}, "mode fp16, ZeRO stage 2, all-gathered/reduced in fp16/fp16"),
    ],
    ids=["stage 0", "stage 3", "fp16"],
)
def test_a_train_step_shows_stage_dtypes_optimizers_and_counts(ranks2, options, words):
    before, *_, after = ranks2.run(_after_steps, {"accumulation": 2, **options}, 4)[0]
    scale = "16" if "fp16" in options else "1"
    for text, num_steps in ((before, 0), (after, 2)):
        counts = f"micro-batches per step: 2, steps: {num_steps}, skipped: 0, loss scale {scale}"
        assert text == f"TrainStep({words}, AdamW, {counts})"


@pytest.mark.parametrize(("options", "end"), [({}, ""), (FP16, ", loss scale 16")], ids=["autocast", "fp16"])
def test_a_report_shows_its_numbers(ranks2, options, end):
    _, first, second, _ = ranks2.run(_after_steps, {"stage": 3, **options}, 2)[0]
    for step, text in ((1, first), (2, second)):
        assert re.fullmatch(rf"StepReport\(step {step}: loss [\d.]+, gradient norm [\d.]+, lr 0.01{end}\)", text), text


def _ledger(model, **ranks):
    return zeroamp.Ledger(plan=zeroamp.build_plan(model, zeroamp.policy_from_config(config(3))), **ranks)


def _headings(html):
    return re.findall("<h4>(.*?)</h4>", html)


@pytest.mark.parametrize("ranks", [{}, {"num_shards": 4}], ids=["no ranks", "4 ranks"])
def test_a_ledger_is_one_line_and_in_a_notebook_its_tables(ranks):
    ledger = _ledger(Llama(tied=True), **ranks)
    low = "91.7% of the trainable elements in bf16"
    title = f"mode autocast, ZeRO stage 3, 3 units below the root, 5 groups, 33,600 parameters, {low}"
    assert repr(ledger) == f"Ledger({title})"
    html = ledger._repr_html_()
    assert html.startswith(f"<p>zeroamp: {title}</p>")
    assert _headings(html) == ["Dtypes between ranks", "Module classes", "Groups", "Bytes of the groups"]
    assert html.count("<table>") == 4
    assert ("shards per rank KiB" in html) == bool(ranks)


def test_names_are_shown_as_text_and_not_as_markup():
    model = nn.Sequential()
    model.add_module("<b>bold</b>", nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    ledger = _ledger(model)
    for html in (ledger._repr_html_(), ledger.per_parameter("html")):
        assert "<b>" not in html
        assert "&lt;b&gt;bold&lt;/b&gt;" in html


def _verified(stage):
    model = wrapped(NAME, config(stage))
    found = zeroamp.explain(model).verify(model, batch(NAME, 0), loss_fn=lambda output: output.float().mean())
    return repr(found), found._repr_html_()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_verification_is_one_line_and_in_a_notebook_its_table(ranks2, stage):
    text, html = ranks2.run(_verified, stage)[0]
    title = "23 parameters, 1 micro-batches: every dtype is the expected one"
    assert text == f"Verification({title}; collectives and their bytes are as planned)"
    assert _headings(html) == [f"zeroamp: {title}"]
    assert html.count("<table>") == 1


@pytest.mark.parametrize("stages", [(3,), (0, 3)], ids=str)
def test_a_plan_is_one_line_and_in_a_notebook_its_tables(stages):
    run = plan(stages=stages)
    assert repr(run) == (
        "RunPlan(67,168 parameters, mode autocast, 8 ranks, 1 x batch 2 x 12 per rank, without activation "
        "checkpointing, GPU (0.0 GiB), 95.6% of the trainable elements in bf16)"
    )
    html = run._repr_html_()
    headings = ["Stages", "Memory of one rank"]
    assert [found.startswith(heading) for found, heading in zip(_headings(html), headings, strict=True)] == [True] * 2
    assert html.count("<table>") == 2
