"""`reduce_bucket_size`: several modules gathered and reduced as one unit. The same bits, fewer collectives."""

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor

import zeroamp
from tests.measuring.collectives import Collectives
from tests.models.prepared import Checkpointed, checkpoint_inside, checkpoint_outside, compile_blocks
from tests.models.small import Llama, batch, loss_of
from tests.oracles import one_process
from tests.processes.training import check_run, check_same_run, config, train, wrapped
from tests.selection import slow_but

FP32, BF16 = torch.float32, torch.bfloat16
NUM_STEPS = 5
CLIP = 0.5
BLOCK = 10_272 + 64  # elements of one of the three blocks: Linear layers and norms
PAIR = {"reduce_bucket_size": 2 * BLOCK}
ALL = {"reduce_bucket_size": 10**9}


def _freeze(model):
    for block in model.blocks[:2]:
        block.qkv.requires_grad_(False)
        block.norm1.requires_grad_(False)


def _freeze_the_first_whole(model):
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)


def _share_modules(model):
    model.blocks[1].out = model.blocks[0].out
    model.blocks[1].norm1 = model.blocks[0].norm1


def _tie_weights(model):
    model.blocks[1].down.weight = model.blocks[0].down.weight
    model.blocks[2].gate_up.weight = model.blocks[0].gate_up.weight  # with another unit, where two are merged


def _checkpoint_second(model):
    """Of the first two blocks, a backward recomputes one."""
    model.blocks._modules["1"] = Checkpointed(model.blocks[1])


def _skip(model, num_ranks_in_this_process=1):
    """Leave the second block out of every other forward, on all ranks alike."""
    calls = []

    def logits(tokens):
        calls.append(0)
        x = model.embed(tokens)
        for index, block in enumerate(model.blocks):
            if index != 1 or (len(calls) - 1) // num_ranks_in_this_process % 2 == 0:
                x = block(x)
        return model.head(model.norm(x))

    model.logits = logits


def evaluate(model, name):
    with torch.no_grad():
        loss_of(model, batch(name, 0))


def evaluate_and_check(model, name):
    evaluate(model, name)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def _train(name, stages, options, fields, mesh_shape=None, **hooks):
    return {
        stage: train(
            name, config(stage, clip=CLIP, **options), NUM_STEPS, mesh_shape=mesh_shape, fields=fields, **hooks
        )
        for stage in stages
    }


def _train_prepared(name, stages, options, fields, before, after, evaluates=False):
    between = evaluate_and_check if evaluates else None
    return _train(name, stages, options, fields, prepare_before=before, prepare=after, between=between)


def check(by_rank, oracle):
    for rank, by_stage in enumerate(by_rank):
        for run in by_stage.values():
            check_run(run, rank, oracle)


def oracle(name="llama_untied", **options):
    return one_process.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP, **options)


@pytest.mark.parametrize("name", slow_but(["llama_tied", "conv", "encoder", "hf_llama"], "llama_tied"))
@pytest.mark.parametrize("fields", slow_but([PAIR, ALL], PAIR), ids=str)
@pytest.mark.parametrize("threshold", slow_but([None, 0], None), ids=["model-wide group", "group per unit"])
def test_all_stages_equal_one_process(ranks2, name, fields, threshold):
    check(ranks2.run(_train, name, (0, 1, 2, 3), {"threshold": threshold}, fields), oracle(name))


def _widen_the_table(model):
    """Make the embedding so large that at stage 3 two blocks are merged by default."""
    model.embed = torch.nn.Embedding(12_000, 32, _weight=torch.arange(12_000 * 32.0).sin().view(-1, 32))


def test_what_is_merged_by_default_has_the_bits_of_one_process(ranks2):
    prepared = {"before": _widen_the_table, "after": None}
    by_rank = ranks2.run(_train_prepared, "llama_untied", (0, 1, 2, 3), {}, {"reduce_bucket_size": None}, **prepared)
    check(by_rank, oracle(prepare=_widen_the_table))


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", slow_but([False, True], False))
@pytest.mark.parametrize("prepare", slow_but([None, _checkpoint_second], None))
@pytest.mark.parametrize("stages", slow_but([(0, 1), (2, 3)], (2, 3)), ids=str)
def test_with_accumulation(ranks2, stages, prepare, evaluates):
    options = {"accumulation": 3, "threshold": 0, "comm": "fp32"}
    by_rank = ranks2.run(_train_prepared, "llama_untied", stages, options, PAIR, None, prepare, evaluates)
    check(by_rank, oracle(accumulation=3, reduce_each=stages[0] >= 2))


@pytest.mark.parametrize(
    "prepare", slow_but([_freeze, _freeze_the_first_whole, _share_modules, _tie_weights], _tie_weights)
)
@pytest.mark.parametrize("threshold", slow_but([None, 0], None), ids=["model-wide group", "group per unit"])
def test_frozen_shared_and_tied_parameters(ranks2, prepare, threshold):
    for fields in (PAIR, ALL):
        by_rank = ranks2.run(
            _train_prepared, "llama_untied", (0, 1, 2, 3), {"threshold": threshold}, fields, prepare, None
        )
        check(by_rank, oracle(prepare=prepare))


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare", slow_but([checkpoint_inside, checkpoint_outside, compile_blocks], checkpoint_outside)
)
@pytest.mark.parametrize("threshold", slow_but([None, 0], None), ids=["model-wide group", "group per unit"])
def test_each_block_checkpointed_or_compiled(ranks2, prepare, threshold):
    options = {"threshold": threshold}
    by_rank = ranks2.run(_train_prepared, "llama_untied", (0, 1, 2, 3), options, PAIR, None, prepare, True)
    check(by_rank, oracle())


@pytest.mark.parametrize("stage", slow_but([0, 1, 3], 0, 3))
def test_a_forward_that_leaves_a_merged_block_out(ranks2, stage):
    by_rank = ranks2.run(_train_prepared, "llama_untied", (stage,), {"threshold": 0}, PAIR, None, _skip)
    check(by_rank, oracle(prepare=functools.partial(_skip, num_ranks_in_this_process=2)))


@pytest.mark.parametrize("stage", slow_but([1, 2, 3], 3))
def test_an_evaluation_that_leaves_a_merged_block_out(ranks2, stage):
    # Forwards alternate: those of training run all blocks, those of the evaluations do not.
    by_rank = ranks2.run(_train_prepared, "llama_untied", (stage,), {"threshold": 0}, PAIR, None, _skip, True)
    check(by_rank, oracle())


@pytest.mark.slow
def test_hybrid_sharding_of_merged_units_with_every_other_option(ranks4):
    expected = ranks4.run(_train, "llama_tied", (2, 3), {"threshold": 0}, {}, (2, 2))
    for fields in (PAIR, {**PAIR, "max_live_parameters": BLOCK, "prefetch_bucket_size": 3 * BLOCK}):
        for ours, theirs in zip(
            ranks4.run(_train, "llama_tied", (2, 3), {"threshold": 0}, fields, (2, 2)), expected, strict=True
        ):
            for stage in (2, 3):
                check_same_run(ours[stage], theirs[stage])


def _count(fields, stage, threshold):
    model = wrapped("llama_tied", config(stage, threshold=threshold), fields=fields)
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Collectives() as collectives:
        loss = model(batch("llama_tied", 0))
        whole = {fqn.split(".")[1] for fqn, p in model.blocks.named_parameters("blocks") if not isinstance(p, DTensor)}
        step.backward(loss)
        step.step()
    counted = {key: calls for key, (calls, _) in zeroamp.traffic(model).by_dtype().items()}
    return dict(collectives.calls), dict(collectives.elements), counted, whole


@pytest.mark.parametrize(
    ("fields", "num_units"),
    [pytest.param({}, 3, marks=pytest.mark.slow), (PAIR, 2), pytest.param(ALL, 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_merged_unit_costs_the_collectives_of_one(ranks2, fields, num_units):
    calls, elements, counted, whole = ranks2.run(_count, fields, 3, 0)[0]
    assert calls == {
        ("all_gather", BF16): 2 * num_units,
        ("all_gather", FP32): 2 * num_units + 1,  # the norms, and the root
        ("all_to_all", BF16): num_units,
        ("all_to_all", FP32): num_units + 1,
        ("all_reduce", torch.float64): 1,
    }
    assert counted == calls
    assert elements == ranks2.run(_count, {}, 3, 0)[0][1]
    assert whole == set(), "released after the forward of the last of its modules"


def _ledger(fields):
    ledger = zeroamp.explain(wrapped("llama_tied", config(3), fields=fields))
    return str(ledger), ledger.group_rows(), ledger.parameter_rows()


def test_the_ledger_says_what_a_merged_unit_is_made_of(ranks2):
    text, groups, parameters = ranks2.run(_ledger, PAIR)[0]
    first = "zeroamp: mode autocast, ZeRO stage 3, 2 units (3 modules) below the root, 4 groups"
    assert " ".join(text.split()).startswith(first)
    rows = {row["group"]: row for row in groups}
    assert (rows["blocks.0"]["modules"], rows["blocks.0"]["elements"]) == ("blocks.0, blocks.1", 2 * 10_272)
    assert (rows["blocks.2"]["modules"], rows["root"]["modules"]) == ("blocks.2", "root")
    assert {row["unit"] for row in parameters if row["parameter"].startswith("blocks.1.qkv")} == {"blocks.0"}
    assert sum(row["elements"] for row in parameters) == sum(row["elements"] for row in groups)


@pytest.mark.slow
def test_a_unit_without_holders_and_one_that_is_the_whole_model(ranks2):
    by_rank = ranks2.run(_train, "llama_untied", (0, 3), {"dtype": None}, ALL)
    check(by_rank, oracle(autocast=None))


def test_the_model_has_the_size_that_the_buckets_assume():
    assert sum(p.numel() for p in Llama(tied=True).blocks[0].parameters()) == BLOCK
