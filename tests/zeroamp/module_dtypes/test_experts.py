"""Mixtures of experts: as plain autocast leaves them, and in bf16 by an override, bit for bit as one process."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import zeroamp
from tests.models.experts import EXPERTS
from tests.oracles import families as oracle
from tests.processes.experts import LR, NUM_STEPS, config, train
from tests.processes.training import same_bits
from tests.selection import slow_but

pytest.importorskip("transformers", reason="most of the models are transformers'")

AUTO = {"lower_precision_safe_modules": "auto"}


@pytest.fixture(scope="module")
def expected():
    """What one process computes, with grouped products in bf16 or as plain autocast leaves them."""
    found = {}

    def of(name, is_low):
        if (name, is_low) not in found:
            with oracle.grouped_products_in(torch.bfloat16) if is_low else nullcontext():
                found[name, is_low] = oracle.train(EXPERTS[name], num_steps=NUM_STEPS, lr=LR)
        return found[name, is_low]

    return of


def _check(runs, expected):
    for rank, run in enumerate(runs):
        assert run.losses == expected.losses[rank]
        assert same_bits(run.parameters, expected.parameters) == []


@pytest.mark.parametrize(
    ("name", "stage", "safe", "is_low"),
    [
        ("Mixtral", 0, {}, True),
        ("Mixtral", 3, {}, True),
        ("DeepSeek-V3", 3, AUTO, True),
        ("gpt-oss", 3, AUTO, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("Mixtral", 2, AUTO, True),
                ("Qwen3-MoE", 3, AUTO, True),
                ("Mixtral", 3, {}, False),
                ("DeepSeek-V3", 3, {}, False),
                ("gpt-oss", 3, {}, False),
            ]
        ),
    ],
)
def test_fused_experts_train_as_in_one_process(ranks2, expected, name, stage, safe, is_low):
    runs = ranks2.run(train, name, config(stage, is_low=is_low, **safe))
    _check(runs, expected(name, is_low))
    assert any(".mlp.experts." in fqn for fqn in runs[0].low) == is_low


# Routers that choose other experts on each rank


@pytest.mark.parametrize(
    ("safe", "stage"), [(AUTO, 3), pytest.param({}, 0, marks=pytest.mark.slow)], ids=["auto", "default"]
)
def test_eager_experts_train_as_in_one_process(ranks2, expected, safe, stage):
    _check(ranks2.run(train, "Mixtral eager", config(stage, is_low=False, **safe)), expected("Mixtral eager", False))


@pytest.mark.parametrize(
    ("stage", "leaf"),
    [(0, None), (3, None), pytest.param(3, ["ListBlock"], marks=pytest.mark.slow)],
    ids=["stage 0", "stage 3", "leaf modules"],
)
def test_experts_that_no_rank_chose_keep_no_gradient(ranks2, expected, stage, leaf):
    cfg = config(stage, is_low=False)
    cfg["zero_optimization"] |= {"leaf_module": {"classes": leaf}} if leaf else {}
    runs = ranks2.run(train, "modules", cfg)
    _check(runs, expected("modules", False))
    for run in runs:
        assert {fqn.partition("experts.")[2][0] for fqn in run.without_gradient} == {"5"}
        assert len(run.without_gradient) == 2 * 3


# Recomputed and compiled


def _checkpoint(model, *, use_reentrant=False):
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


def _compile(model):
    for block in model.model.layers:
        block.compile(fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    "prepare",
    slow_but([_checkpoint, partial(_checkpoint, use_reentrant=True), _compile], _checkpoint),
    ids=["computed again", "computed again, reentrant", "compiled"],
)
def test_experts_that_are_computed_again_or_compiled_have_the_same_bits(ranks2, expected, prepare):
    _check(ranks2.run(train, "Mixtral", config(3), prepare=prepare), expected("Mixtral", True))


# DeepSeek-V3's router


def _dtype_of_router(keep):
    family = EXPERTS["DeepSeek-V3"]
    model = family.seeded()
    cfg = config(3) | {"data_types": {"keep_in_fp32_modules": keep}}
    zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg))
    found = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _module, _args, output: found.append(output[0].dtype))
    model(**family.batch(0))
    return found


def test_the_router_of_deepseek_v3_runs_in_bf16_unless_it_is_kept_in_fp32(ranks2):
    assert ranks2.run(_dtype_of_router, []) == [[torch.bfloat16]] * 2
    assert ranks2.run(_dtype_of_router, ["DeepseekV3TopkRouter"]) == [[torch.float32]] * 2
