"""Mixtures of experts: as plain autocast leaves them, and in bf16 by an override, bit for bit as one process."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch

from tests.models.experts import EXPERTS
from tests.oracles import families as oracle
from tests.processes.experts import LR, NUM_STEPS, config, train
from tests.processes.training import same_bits

pytest.importorskip("transformers", reason="most of the models are transformers'")

AUTO = {"lower_precision_safe_modules": "auto"}


@cache
def expected(name, is_low):
    """What one process computes, with grouped products in bf16 or as plain autocast leaves them."""
    with oracle.grouped_products_in(torch.bfloat16) if is_low else nullcontext():
        return oracle.train(EXPERTS[name], num_steps=NUM_STEPS, lr=LR)


def _check(runs, of_one):
    for rank, run in enumerate(runs):
        assert run.losses == of_one.losses[rank]
        assert same_bits(run.parameters, of_one.parameters) == []


@pytest.mark.parametrize(
    ("name", "stage", "safe", "is_low"),
    [
        ("Mixtral", 0, {}, True),
        ("DeepSeek-V3", 3, AUTO, True),
        ("gpt-oss", 3, AUTO, True),
        pytest.param("gpt-oss", 3, {}, False, marks=pytest.mark.slow),
    ],
)
def test_fused_experts_train_as_in_one_process(ranks2, name, stage, safe, is_low):
    runs = ranks2.run(train, name, config(stage, is_low=is_low, **safe))
    _check(runs, expected(name, is_low))
    assert any(".mlp.experts." in fqn for fqn in runs[0].low) == is_low


# Routers that choose other experts on each rank


def test_eager_experts_train_as_in_one_process(ranks2):
    _check(ranks2.run(train, "Mixtral eager", config(3, is_low=False, **AUTO)), expected("Mixtral eager", False))


@pytest.mark.parametrize("stage", [0, 3])
def test_experts_that_no_rank_chose_keep_no_gradient(ranks2, stage):
    runs = ranks2.run(train, "modules", config(stage, is_low=False))
    _check(runs, expected("modules", False))
    for run in runs:
        assert {fqn.partition("experts.")[2][0] for fqn in run.without_gradient} == {"5"}
        assert len(run.without_gradient) == 2 * 3


def _checkpoint(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def test_experts_that_are_computed_again_have_the_same_bits(ranks2):
    _check(ranks2.run(train, "Mixtral", config(3), prepare=_checkpoint), expected("Mixtral", True))
