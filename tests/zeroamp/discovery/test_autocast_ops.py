"""`zeroamp.autocast_ops`: mixtures of experts, bit for bit as an oracle that casts their grouped products."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.experts import EXPERTS, GroupedModel
from tests.models.families import NUM_RANKS, loss_of
from tests.oracles import families as oracle
from tests.processes.experts import LR, NUM_STEPS, config, train
from tests.processes.training import full_parameters, same_bits
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


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
@pytest.mark.parametrize("ops", slow_but([(), ("grouped_mm",)], ("grouped_mm",)), ids=["off", "on"])
def test_mixtral_trains_as_in_one_process_at_every_stage(ranks2, expected, ops, stage):
    runs = ranks2.run(train, "Mixtral", config(stage, ops))
    _check(runs, expected("Mixtral", bool(ops)))
    assert not any(".mlp.gate." in fqn for fqn in runs[0].low), "the router's class is not in the list"
    assert any(".mlp.experts." in fqn for fqn in runs[0].low) == bool(ops)


@pytest.mark.parametrize("safe", slow_but([{}, AUTO], AUTO), ids=["default", "auto"])
@pytest.mark.parametrize("ops", slow_but([(), ("grouped_mm",)], ("grouped_mm",)), ids=["off", "on"])
@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3", "gpt-oss"])
def test_other_families_train_as_in_one_process(ranks2, expected, name, ops, safe):
    runs = ranks2.run(train, name, config(3, ops, **safe))
    _check(runs, expected(name, bool(ops)))
    assert any(".mlp.experts." in fqn for fqn in runs[0].low) == bool(ops)


def test_the_two_numerics_differ(expected):
    assert expected("Mixtral", False).losses != expected("Mixtral", True).losses


# Routers that choose other experts on each rank


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
@pytest.mark.parametrize("safe", slow_but([{}, AUTO], AUTO), ids=["default", "auto"])
def test_eager_experts_train_as_in_one_process(ranks2, expected, safe, stage):
    _check(ranks2.run(train, "Mixtral eager", config(stage, (), **safe)), expected("Mixtral eager", False))


def _chosen():
    """The experts that the tokens of this rank's first batch choose in the first layer."""
    family = EXPERTS["Mixtral eager"]
    model = family.seeded()
    found = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _module, args: found.append(args[1]))
    model(**family.batch(dist.get_rank()))
    return found[0].flatten().bincount(minlength=4).tolist()


def test_the_ranks_of_these_tests_choose_other_experts(ranks2):
    first, second = ranks2.run(_chosen)
    assert first != second


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
@pytest.mark.parametrize("leaf", slow_but([None, ["ListBlock"]], None), ids=["default units", "leaf modules"])
def test_experts_that_no_rank_chose_keep_no_gradient(ranks2, expected, leaf, stage):
    cfg = config(stage, ())
    cfg["zero_optimization"] |= {"leaf_module": {"classes": leaf}} if leaf else {}
    runs = ranks2.run(train, "modules", cfg)
    _check(runs, expected("modules", False))
    for run in runs:
        assert {fqn.partition("experts.")[2][0] for fqn in run.without_gradient} == {"5"}
        assert len(run.without_gradient) == 2 * 3


# Recomputation


def _checkpoint_blocks(model, *, use_reentrant):
    if isinstance(model, GroupedModel):
        model.is_checkpointed = True
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


@pytest.mark.parametrize(
    ("name", "use_reentrant"),
    [
        ("Mixtral", False),
        pytest.param("Mixtral", True, marks=pytest.mark.slow),
        ("grouped", False),
        pytest.param("grouped, read twice", False, marks=pytest.mark.slow),
    ],
)
def test_experts_that_are_computed_again_are_cast_again(ranks2, expected, name, use_reentrant):
    prepare = partial(_checkpoint_blocks, use_reentrant=use_reentrant)
    runs = ranks2.run(train, name, config(3), prepare=prepare)
    _check(runs, expected(name, True))
    is_low = any(fqn.endswith(("experts.weight", "experts.gate_up_proj")) for fqn in runs[0].low)
    assert is_low == (name != "grouped, read twice")


# Two models, autocast around the loss, what is left behind


class Pair(torch.nn.Module):
    """A wrapped model inside the forward of another."""

    def __init__(self, outer):
        super().__init__()
        self.outer, self.hidden, self.found = outer, [], []

    def forward(self, x):
        before = self.outer(x=x)
        self.found += [float(inner(x=x).detach()) for inner in self.hidden]
        return before, self.outer(x=x)


def _losses_of_two_models(inner_ops, outer_ops):
    family = EXPERTS["grouped"]
    batch = family.batch(0)
    inner = family.seeded()
    zeroamp.wrap_model(inner, zeroamp.policy_from_config(config(3, inner_ops)), example_inputs=batch)
    pair = Pair(family.seeded())
    zeroamp.wrap_model(pair, zeroamp.policy_from_config(config(3, outer_ops)), example_inputs=batch)
    pair.hidden.append(inner)
    before, after = pair(**batch)
    return [float(before.detach()), *pair.found, float(after.detach())]


@pytest.mark.parametrize(("inner", "outer"), [((), ("grouped_mm",)), (("grouped_mm",), ())])
def test_two_models_of_a_process_keep_their_own_numerics(ranks2, inner, outer):
    family = EXPERTS["grouped"]
    by_ops = {}
    for ops in (inner, outer):
        products = oracle.grouped_products_in(torch.bfloat16) if ops else nullcontext()
        with products, torch.autocast("cpu", dtype=torch.bfloat16):
            by_ops[ops] = float(loss_of(family.seeded(), family.batch(0)).detach())
    assert by_ops[inner] != by_ops[outer], "or the test shows nothing"
    for found in ranks2.run(_losses_of_two_models, inner, outer):
        assert found == [by_ops[outer], by_ops[inner], by_ops[outer]]


def _wrapped(name="grouped", **more):
    family = EXPERTS[name]
    return zeroamp.wrap_model(
        family.seeded(), zeroamp.policy_from_config(config(3) | more), example_inputs=family.batch(0)
    )


def _outside():
    model = _wrapped()
    train_step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, weight = torch.ones(4, 16), torch.ones(2, 16, 16)
    ends = torch.tensor([2, 4], dtype=torch.int32)
    with train_step.autocast():
        inside = torch.nn.functional.grouped_mm(x, weight, offs=ends).dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside = torch.nn.functional.grouped_mm(x, weight, offs=ends).dtype
    wrapped = [fqn for fqn, module in model.named_modules() if fqn and "forward" in vars(module)]
    verified = str(zeroamp.explain(model).verify(model, EXPERTS["grouped"].batch(0)))
    return inside, outside, wrapped, verified


def test_autocast_of_the_step_casts_too(ranks2):
    for inside, outside, wrapped, verified in ranks2.run(_outside):
        assert (inside, outside) == (torch.bfloat16, torch.float32)
        assert wrapped == ["blocks.0.experts", "blocks.1.experts"]
        assert verified


# Compiled blocks


def _compiled_and_eager(name, ops, use_checkpoint):
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")  # transformers' own
    results = []
    for is_compiled in (False, True):
        family = EXPERTS[name]
        model = family.seeded()
        zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3, ops)), example_inputs=family.batch(0))
        if use_checkpoint:
            _checkpoint_blocks(model, use_reentrant=False)
        if is_compiled:
            blocks = model.blocks if name.startswith("grouped") else model.model.layers
            for block in blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        train_step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=LR))
        losses = []
        for index in range(2):
            loss = loss_of(model, family.batch(index * NUM_RANKS + dist.get_rank()))
            losses.append(float(loss.detach()))
            train_step.backward(loss)
            train_step.step()
        results.append((losses, full_parameters(model)))
    return results


@pytest.mark.parametrize(
    ("name", "use_checkpoint"),
    [
        ("grouped", False),
        pytest.param("grouped", True, marks=pytest.mark.slow),
        pytest.param("Mixtral", False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_block_has_the_bits_of_an_eager_one(ranks2, name, use_checkpoint):
    for eager, compiled in ranks2.run(_compiled_and_eager, name, ("grouped_mm",), use_checkpoint):
        assert compiled[0] == eager[0]
        assert same_bits(compiled[1], eager[1]) == []


# DeepSeek-V3's router


def _dtype_of_router(keep):
    family = EXPERTS["DeepSeek-V3"]
    model = family.seeded()
    cfg = config(3) | {"data_types": {"keep_in_fp32_modules": keep}}
    zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg), example_inputs=family.batch(0))
    found = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _module, _args, output: found.append(output[0].dtype))
    model(**family.batch(0))
    return found


def test_the_router_of_deepseek_v3_runs_in_bf16_unless_it_is_kept_in_fp32(ranks2):
    assert ranks2.run(_dtype_of_router, []) == [[torch.bfloat16]] * 2
    assert ranks2.run(_dtype_of_router, ["DeepseekV3TopkRouter"]) == [[torch.float32]] * 2
