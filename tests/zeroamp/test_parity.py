"""Losses, gradient norms and parameters, bit for bit: stages against each other and against the oracle."""

import pytest

from tests import reference
from tests.models import MODELS
from tests.training import config, same_bits, train

NUM_STEPS = 10
CLIP = 0.5  # low enough that every step clips


def _all_stages(name, stages, options):
    return {stage: train(name, config(stage, clip=CLIP, **options), NUM_STEPS) for stage in stages}


def _check(by_rank, oracle):
    losses, norms, parameters = oracle
    for rank, by_stage in enumerate(by_rank):
        for stage, (our_losses, our_norms, our_parameters, mean_losses) in by_stage.items():
            assert our_losses == [ranks[rank] for ranks in losses], f"losses at stage {stage}"
            assert our_norms == norms, f"norms at stage {stage}"
            assert same_bits(our_parameters, parameters) == [], f"parameters at stage {stage}"
            flat = [sum(micro for micros in ranks for micro in micros) / sum(map(len, ranks)) for ranks in losses]
            assert mean_losses == pytest.approx(flat, rel=1e-6), "the mean is summed in another order"


@pytest.mark.parametrize("name", MODELS)
def test_all_stages_equal_one_process_with_autocast_on_an_fp32_wire(ranks2, name):
    by_rank = ranks2.run(_all_stages, name, (0, 1, 2, 3), {"comm": "fp32"})
    _check(by_rank, reference.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP))


@pytest.mark.parametrize("name", MODELS)
def test_all_stages_equal_one_process_with_autocast_on_the_default_wire(ranks2, name):
    # bf16 on the wire loses nothing: the raw gradients are bf16, and the sum is fp32.
    by_rank = ranks2.run(_all_stages, name, (0, 1, 2, 3), {})
    _check(by_rank, reference.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP))
