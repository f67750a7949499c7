"""Blocks compiled without a graph break, and activation checkpointing, at every stage."""

import pytest
import torch

from tests.models.prepared import checkpoint_inside, checkpoint_outside, compile_blocks
from tests.models.small import Llama
from tests.oracles import one_process
from tests.processes.training import check_run, config, train
from tests.selection import slow_but

NAME = "llama_tied"
NUM_STEPS = 5


def _compile_with_inductor(model: Llama):
    for block in model.blocks:
        block.compile(fullgraph=True)


def _run(stage, how, accumulation=1, threshold=None):
    after = {
        "compile": compile_blocks,
        "inductor": _compile_with_inductor,
        "inside": checkpoint_inside,
        "outside": checkpoint_outside,
    }
    # bf16 communication would round stage 1's accumulated fp32 gradient.
    comm = "fp32" if accumulation > 1 else None
    cfg = config(stage, accumulation=accumulation, comm=comm, threshold=threshold)
    return train(NAME, cfg, NUM_STEPS, prepare=after[how])


@pytest.mark.parametrize("threshold", slow_but([None, 0], None), ids=["model-wide group", "group per unit"])
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
@pytest.mark.parametrize("how", ["compile", "inside", "outside"])
def test_same_bits_as_the_oracle(ranks2, stage, how, threshold):
    expected = one_process.train(NAME, world_size=2, num_steps=NUM_STEPS)
    for rank, run in enumerate(ranks2.run(_run, stage, how, 1, threshold)):
        check_run(run, rank, expected)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
def test_checkpointing_around_the_units_with_accumulation(ranks2, stage):
    reduce_each = stage >= 2
    expected = one_process.train(NAME, world_size=2, num_steps=NUM_STEPS, accumulation=2, reduce_each=reduce_each)
    for rank, run in enumerate(ranks2.run(_run, stage, "outside", 2)):
        check_run(run, rank, expected)


@pytest.mark.slow
def test_inductor_compiles_each_block_whole_and_trains(ranks2):
    losses, _, _ = one_process.train(NAME, world_size=2, num_steps=NUM_STEPS)
    ours = ranks2.run(_run, 3, "inductor")[0].losses
    # inductor fuses and reorders bf16 arithmetic: 2^-8 per rounding, over a few steps.
    torch.testing.assert_close(torch.tensor(ours), torch.tensor([ranks[0] for ranks in losses]), rtol=2e-2, atol=0)
    assert ours[-1][0] < ours[0][0]
