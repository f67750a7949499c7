"""A loop without `TrainStep`: backward, clip, step and zero_grad of plain torch, bit for bit as in one process."""

import contextlib
import functools
import logging
import warnings

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.families import FAMILIES, loss_of
from tests.oracles import plain_loop
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but

NUM_STEPS = 2
OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
}
CASES = {
    "GNN, 3 micro-batches": ((1, 2), ("GNN", 3, "SGD"), {}),
    "GNN, 3 micro-batches that are reduced once": (
        (0, 3),
        ("GNN", 3, "AdamW"),
        {"how": "the last micro-batch is reduced"},
    ),
    "evaluations and a forward before the step": ((0, 3), ("Llama", 1, "AdamW"), {"how": "other forwards"}),
    "compiled": ((0, 3), ("Llama", 1, "AdamW"), {"how": "compiled"}),
}
"""Stages; family, micro-batches per optimizer step and optimizer; and how the loop runs."""


def _train(stage, family, num_micro, optimizer, *, how="each micro-batch is reduced", clip=None, options=None):
    """Return (losses[step][micro] of this rank, FQNs without gradient per step, parameters, norms per step)."""
    family = FAMILIES[family]
    policy = zeroamp.policy_from_config(config(stage, **(options or {})))
    wrapped = zeroamp.wrap_model(family.seeded(), policy)
    model = torch.compile(wrapped, backend="aot_eager") if how == "compiled" else wrapped
    if how == "other forwards":
        _evaluate(model, family)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    names = {parameter: fqn for fqn, parameter in wrapped.named_parameters()}
    losses, without, norms = [], [], []
    optimizer.register_step_pre_hook(
        lambda *_: without.append([fqn for parameter, fqn in names.items() if parameter.grad is None])
    )
    for step in range(NUM_STEPS):
        losses.append([])
        for micro in range(num_micro):
            batch = family.batch(plain_loop.index_of(step, micro, dist.get_rank(), num_micro))
            if how == "the last micro-batch is reduced":
                wrapped.set_requires_gradient_sync(micro + 1 == num_micro)
            loss = loss_of(model, batch)
            losses[-1].append(float(loss.detach()))
            (loss / num_micro).backward()
        clipped = model.parameters()
        if how == "a forward before the clip":
            loss_of(model, family.batch(999))
            clipped = optimizer.param_groups[0]["params"]  # after that forward, the model's own are unsharded
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(clipped, clip).full_tensor()))
        if how == "other forwards":
            _evaluate(model, family)
            loss_of(model, family.batch(999))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, without, full_parameters(wrapped), norms


def _evaluate(model, family):
    model.eval()
    with torch.no_grad():
        loss_of(model, family.batch(999))
    model.train()


def _at_stages(stages, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own code
        logging.getLogger("transformers").setLevel(logging.ERROR)
        return {stage: _train(stage, *args, **options) for stage in stages}


@pytest.mark.parametrize("name", slow_but(CASES, *(CASES.keys() - {"compiled"})))
def test_a_plain_loop_has_the_bits_of_one_process(ranks2, name):
    stages, (family, num_micro, optimizer), more = CASES[name]
    losses, without, parameters, _ = plain_loop.train(
        FAMILIES[family],
        num_steps=NUM_STEPS,
        num_micro=num_micro,
        make_optimizer=OPTIMIZERS[optimizer],
        reduces_each=more.get("how") != "the last micro-batch is reduced",
    )
    assert any(without) == (family == "GNN"), "its unused parameters have no gradient"
    for rank, by_stage in enumerate(ranks2.run(_at_stages, stages, family, num_micro, optimizer, **more)):
        for stage, (own_losses, own_without, own_parameters, _) in by_stage.items():
            assert own_losses == losses[rank], stage
            assert own_without == without, stage
            assert same_bits(own_parameters, parameters) == [], stage


@pytest.mark.parametrize(
    "how", slow_but(["each micro-batch is reduced", "a forward before the clip"], "each micro-batch is reduced")
)
def test_clip_grad_norm_of_torch_clips_to_the_norm_over_all_parameters(ranks2, how):
    """On shards. `test_other_scripts` has stage 0, where the bits are those of DDP."""
    by_rank = ranks2.run(_at_stages, (1, 3), "GNN", 1, "SGD", clip=0.1, how=how)
    options = {"num_steps": NUM_STEPS, "num_micro": 1, "make_optimizer": OPTIMIZERS["SGD"], "clip": 0.1}
    *_, parameters, norms = plain_loop.train(FAMILIES["GNN"], **options)
    assert min(norms) > 0.1, "each step clips"
    for by_stage in by_rank:
        for own_parameters, own_norms in (run[2:] for run in by_stage.values()):
            # torch adds the squares of each shard, then of all shards: another order than in one process.
            assert own_norms == pytest.approx(norms, rel=1e-5)
            for fqn, own in own_parameters.items():
                torch.testing.assert_close(own, parameters[fqn], rtol=1e-4, atol=1e-6)
        assert by_stage[1][3] == by_stage[3][3]
        assert same_bits(by_stage[1][2], by_stage[3][2]) == []


def _two_optimizers_in_turn(model, optimizers, loss_at, step):
    loss_at(2 * step).backward()
    optimizers[step % 2].step()
    model.zero_grad()


def _one_graph_twice(model, optimizers, loss_at, step):
    loss = loss_at(2 * step)
    (loss * 0.5).backward(retain_graph=True)
    (loss * 2).backward()
    _step_all(model, optimizers)


def _the_last_graph_first(model, optimizers, loss_at, step):
    first, last = loss_at(2 * step), loss_at(2 * step + 1)
    last.backward()
    first.backward()
    _step_all(model, optimizers)


def _one_forward_one_backward(model, optimizers, loss_at, step):
    """A pipeline's order: a forward of the next micro-batch runs before each backward."""
    losses = [loss_at(3 * step)]
    for micro in (1, 2):
        losses.append(loss_at(3 * step + micro))
        losses[micro - 1].backward()
    losses[-1].backward()
    _step_all(model, optimizers)


def _frozen_in_odd_steps(model, optimizers, loss_at, step):
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" not in fqn or step % 2 == 0)
    loss_at(2 * step).backward()
    _step_all(model, optimizers)


def _zeros_instead_of_none(model, optimizers, loss_at, step):
    loss_at(2 * step).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def _step_all(model, optimizers):
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


LOOPS = (
    _two_optimizers_in_turn, _one_graph_twice, _the_last_graph_first, _one_forward_one_backward, _frozen_in_odd_steps,
    _zeros_instead_of_none,
)  # fmt: skip


def _run_loop(loop, model, context):
    named = dict(model.named_parameters())
    halves = [[named[fqn] for fqn in named if ("norm" in fqn) == is_norm] for is_norm in (True, False)]
    optimizers = [OPTIMIZERS["AdamW"](halves[0]), OPTIMIZERS["SGD"](halves[1])]

    def loss_at(index):
        with context():
            return loss_of(model, FAMILIES["Llama"].batch(index))

    for step in range(NUM_STEPS):
        loop(model, optimizers, loss_at, step)
    return full_parameters(model)


def _other_loops(stage):
    """The parameters after each loop. Both ranks have the same batches: the average over ranks changes no bit."""
    policy = zeroamp.policy_from_config(config(stage))
    models = (zeroamp.wrap_model(FAMILIES["Llama"].seeded(), policy) for _ in LOOPS)
    return [_run_loop(loop, model, contextlib.nullcontext) for loop, model in zip(LOOPS, models, strict=True)]


@pytest.mark.parametrize("stage", slow_but([0, 3], 3))
def test_other_loops_have_the_bits_of_one_process(ranks2, stage):
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    for loop, ours in zip(LOOPS, ranks2.run(_other_loops, stage)[0], strict=True):
        assert same_bits(ours, _run_loop(loop, FAMILIES["Llama"].seeded(), autocast)) == [], loop.__name__
