"""Losses, gradient norms and parameters, bit for bit: stages against each other and against the oracle."""

import pytest
import torch

from tests.models.small import MODELS, Llama
from tests.oracles import one_process
from tests.processes.ranks import Ranks
from tests.processes.training import check_run, check_same_run, config, same_bits, train
from tests.selection import slow_but

NUM_STEPS = 10
CLIP = 0.5  # low enough that every step clips


NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


def _all_stages(name, stages, options, *, mesh_shape=None, prepare=None):
    cfgs = {stage: config(stage, clip=CLIP, **options) for stage in stages}
    return {
        stage: train(name, cfg, NUM_STEPS, mesh_shape=mesh_shape, prepare_before=prepare) for stage, cfg in cfgs.items()
    }


def _check_equal(by_rank):
    """All stages the same bits, on every rank."""
    for by_stage in by_rank:
        first = next(iter(by_stage.values()))
        for run in by_stage.values():
            check_same_run(run, first)


def _check(by_rank, oracle):
    losses = oracle[0]
    flat = [sum(micro for micros in ranks for micro in micros) / sum(map(len, ranks)) for ranks in losses]
    for rank, by_stage in enumerate(by_rank):
        for run in by_stage.values():
            check_run(run, rank, oracle)
            assert run.mean_losses == pytest.approx(flat, rel=1e-6), "the mean is summed in another order"


@pytest.mark.parametrize("name", slow_but(MODELS, "llama_tied"))
def test_all_stages_equal_one_process_with_autocast_on_an_fp32_wire(ranks2, name):
    by_rank = ranks2.run(_all_stages, name, (0, 1, 2, 3), {"comm": "fp32"})
    _check(by_rank, one_process.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP))


@pytest.mark.parametrize("name", slow_but(MODELS, "llama_tied", "hf_llama", "conv"))
def test_all_stages_equal_one_process_with_autocast_on_the_default_wire(ranks2, name):
    # communication in bf16 loses nothing: the raw gradients are bf16, and the sum is fp32.
    by_rank = ranks2.run(_all_stages, name, (0, 1, 2, 3), {})
    _check(by_rank, one_process.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(MODELS, "llama_untied"))
def test_a_group_per_unit_and_dtype_gives_the_same_bits_as_the_model_wide_group(ranks2, name):
    by_rank = ranks2.run(_all_stages, name, (0, 1, 2, 3), {"threshold": 0})
    _check(by_rank, one_process.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP))


@pytest.mark.parametrize("name", slow_but(["llama_tied", "conv"], "llama_tied"))
def test_stages_0_and_1_accumulate_on_each_rank_in_fp32_and_reduce_once(ranks2, name):
    by_rank = ranks2.run(_all_stages, name, (0, 1), {"accumulation": 4, "comm": "fp32"})
    _check(by_rank, one_process.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP, accumulation=4))


@pytest.mark.parametrize("name", slow_but(MODELS, "llama_tied"))
def test_stages_2_and_3_reduce_every_micro_batch_and_accumulate_in_fp32(ranks2, name):
    by_rank = ranks2.run(_all_stages, name, (2, 3), {"accumulation": 4})
    oracle = one_process.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP, accumulation=4, reduce_each=True)
    _check(by_rank, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["llama_tied", "llama_untied", "conv", "encoder"], "llama_tied"))
def test_stages_2_and_3_agree_on_a_native_bf16_wire_with_accumulation(ranks2, name):
    _check_equal(ranks2.run(_all_stages, name, (2, 3), {"accumulation": 4, **NATIVE}))


def test_native_bf16_reduction_is_another_sum_than_fp32(ranks2):
    # Were it the same, the tests of native reductions would not have tried it.
    (native, *_), (summed, *_) = (ranks2.run(_all_stages, "llama_tied", (3,), options) for options in (NATIVE, {}))
    assert same_bits(native[3].parameters, summed[3].parameters) != []


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["llama_untied", "encoder"], "encoder"))
def test_all_stages_equal_one_process_on_4_ranks(ranks4, name):
    by_rank = ranks4.run(_all_stages, name, (0, 1, 2, 3), {})
    _check(by_rank, one_process.train(name, world_size=4, num_steps=NUM_STEPS, clip=CLIP))


FEW_STEPS = 4


def _stages_and_meshes(shapes, options):
    """Runs of stages 0 to 3 on all ranks in one axis, and of stages 1 to 3 on meshes of (replicas, shards)."""
    flat = [train("encoder", config(stage, clip=CLIP, **options), FEW_STEPS) for stage in (0, 1, 2, 3)]
    cfgs = [(shape, config(stage, clip=CLIP, **options)) for shape in shapes for stage in (1, 2, 3)]
    return flat, [train("encoder", cfg, FEW_STEPS, mesh_shape=shape) for shape, cfg in cfgs]


@pytest.mark.parametrize(
    ("world_size", "shapes"),
    [
        (3, []),
        pytest.param(5, [(5, 1)], marks=pytest.mark.slow),
        pytest.param(6, [(3, 2)], marks=pytest.mark.slow),
        pytest.param(8, [(2, 4), (4, 2), (8, 1)], marks=pytest.mark.slow),
    ],
)
def test_all_stages_and_meshes_have_the_bits_of_one_tree(world_size, shapes):
    ranks = Ranks(world_size)
    try:
        by_rank = ranks.run(_stages_and_meshes, shapes, {})
    finally:
        ranks.stop()
    oracle = one_process.train("encoder", world_size=world_size, num_steps=FEW_STEPS, clip=CLIP)
    for rank, (flat, hybrid) in enumerate(by_rank):
        for run in (*flat, *hybrid):
            check_run(run, rank, oracle)


@pytest.mark.slow
def test_another_number_of_shards_than_a_power_of_two_is_a_tree_too(request):
    ranks = Ranks(6)
    try:
        by_rank = ranks.run(_stages_and_meshes, [(2, 3)], {})
    finally:
        ranks.stop()
    oracle = one_process.train("encoder", world_size=6, num_steps=FEW_STEPS, clip=CLIP, num_replicas=2)
    for rank, (_, hybrid) in enumerate(by_rank):
        for run in hybrid:
            check_run(run, rank, oracle)


def test_hybrid_sharding_has_the_bits_of_one_axis(ranks4):
    by_rank = ranks4.run(_all_stages, "llama_tied", (1, 2, 3), {}, mesh_shape=(2, 2))
    _check(by_rank, one_process.train("llama_tied", world_size=4, num_steps=NUM_STEPS, clip=CLIP))


@pytest.mark.slow
def test_hybrid_sharding_sums_micro_batches_before_replicas(ranks4):
    by_rank = ranks4.run(_all_stages, "llama_tied", (2, 3), {"accumulation": 3}, mesh_shape=(2, 2))
    options = {"world_size": 4, "num_steps": NUM_STEPS, "clip": CLIP, "accumulation": 3, "reduce_each": True}
    _check(by_rank, one_process.train("llama_tied", num_replicas=2, **options))


@pytest.mark.parametrize("name", slow_but(["llama_tied", "conv", "encoder"], "llama_tied"))
def test_bf16_mode_equals_a_bf16_model_with_fp32_master_weights(ranks2, name):
    by_rank = ranks2.run(_all_stages, name, (0, 1, 2, 3), {"dtype": None, "bf16": {"enabled": True}})
    _check(by_rank, one_process.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP, low_model=torch.bfloat16))


def test_without_a_precision_mode_all_is_fp32(ranks2):
    by_rank = ranks2.run(_all_stages, "llama_tied", (0, 1, 2, 3), {"dtype": None})
    _check(by_rank, one_process.train("llama_tied", world_size=2, num_steps=NUM_STEPS, clip=CLIP, autocast=None))


def _freeze(model):
    for block in model.blocks:
        block.qkv.requires_grad_(False)
        block.norm1.requires_grad_(False)


def test_frozen_parameters_stay_and_are_left_out_of_the_norm(ranks2):
    by_rank = ranks2.run(_all_stages, "llama_untied", (0, 1, 2, 3), {}, prepare=_freeze)
    oracle = one_process.train("llama_untied", world_size=2, num_steps=NUM_STEPS, clip=CLIP, prepare=_freeze)
    _check(by_rank, oracle)


def _share_linear_across_units(model: Llama):
    model.blocks[2].out = model.blocks[0].out


def _share_norm_across_units(model: Llama):
    model.blocks[2].norm1 = model.blocks[0].norm1


def _tie_weights_across_units(model: Llama):
    model.blocks[2].down.weight = model.blocks[0].down.weight


@pytest.mark.parametrize(
    "share",
    slow_but(
        [_share_linear_across_units, _share_norm_across_units, _tie_weights_across_units], _share_linear_across_units
    ),
)
@pytest.mark.parametrize("threshold", slow_but([None, 0], None), ids=["model-wide group", "group per unit"])
def test_what_two_units_share_is_reduced_once_for_both(ranks2, share, threshold):
    by_rank = ranks2.run(_all_stages, "llama_untied", (0, 1, 2, 3), {"threshold": threshold}, prepare=share)
    _check(by_rank, one_process.train("llama_untied", world_size=2, num_steps=NUM_STEPS, clip=CLIP, prepare=share))


@pytest.mark.slow
@pytest.mark.parametrize(
    "share", slow_but([_share_linear_across_units, _share_norm_across_units], _share_linear_across_units)
)
def test_what_two_units_share_in_the_other_modes(ranks2, share):
    by_rank = ranks2.run(_all_stages, "llama_untied", (0, 3), {"dtype": None}, prepare=share)
    oracle = {"world_size": 2, "num_steps": NUM_STEPS, "clip": CLIP, "prepare": share}
    _check(by_rank, one_process.train("llama_untied", autocast=None, **oracle))
    by_rank = ranks2.run(_all_stages, "llama_untied", (0, 3), {"dtype": None, "bf16": {"enabled": True}}, prepare=share)
    _check(by_rank, one_process.train("llama_untied", low_model=torch.bfloat16, **oracle))


def _share(model: Llama):
    model.blocks[2] = model.blocks[0]  # one unit, called twice
    model.blocks[1].norm2 = model.blocks[1].norm1  # one module, called twice in a unit


def test_modules_used_twice(ranks2):
    # The unit that is called twice reduces after each call, so its gradient is a sum of averages here and an average of
    # sums in the oracle: equal but for fp32 rounding of the gradients, which AdamW's first steps pass on at lr size.
    by_rank = ranks2.run(_all_stages, "llama_tied", (0, 1, 2, 3), {}, prepare=_share)
    _check_equal([{stage: run for stage, run in by_stage.items() if stage > 0} for by_stage in by_rank])
    losses, norms, _ = one_process.train("llama_tied", world_size=2, num_steps=NUM_STEPS, clip=CLIP, prepare=_share)
    for rank, by_stage in enumerate(by_rank):
        for run in by_stage.values():
            expected = torch.tensor([ranks[rank] for ranks in losses])
            torch.testing.assert_close(torch.tensor(run.losses), expected, rtol=1e-4, atol=0)
            torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(norms), rtol=2e-3, atol=0)
