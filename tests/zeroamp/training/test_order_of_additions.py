"""In which order the gradients of an activation are added that several units read.

FSDP2 passes a unit's inputs through an autograd function, which marks the end of the unit's backward. The gradients
that the unit itself gives to an input are added there first, and their sum is then added to those of other readers.
Without units, autograd adds one after the other, the last reader's first. Both are the same additions in the same order
unless a unit reads an activation twice that something after the unit reads too.
"""

import torch
import torch.distributed as dist

from tests.models.small import batch, build
from tests.oracles import one_process, plain_fsdp2
from tests.processes.training import check_runs, config, same_bits, train

NAME = "residual_skips"
NUM_STEPS = 2
UNITS = [f"{part}.{index}" for part in ("down", "up", "side") for index in range(3)]


def _at_all_stages():
    return [train(NAME, config(stage), NUM_STEPS) for stage in (0, 1, 2, 3)]


def _plain():
    def losses_of(model):
        for index in range(NUM_STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                yield model(batch(NAME, index * 2 + dist.get_rank()))

    return plain_fsdp2.train(build(NAME), UNITS, losses_of, world_size=2)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, *tensors):
        return tensors

    @staticmethod
    def backward(_ctx, *gradients):
        return gradients


def _pass_inputs_through_a_node(model):
    for fqn in UNITS:
        model.get_submodule(fqn).register_forward_pre_hook(lambda _module, args: _Identity.apply(*args))


def test_units_that_read_a_skip_twice_add_in_one_order(ranks2):
    """Units that read a skip twice add in the order of FSDP2 alone and of one process that adds per unit."""
    theirs = ranks2.run(_plain)
    oracle = one_process.train(NAME, world_size=2, num_steps=NUM_STEPS, prepare=_pass_inputs_through_a_node)
    by_rank = ranks2.run(_at_all_stages)
    check_runs(by_rank, oracle)
    for runs, (losses, parameters) in zip(by_rank, theirs, strict=True):
        for run in runs:
            assert [loss for (loss,) in run.losses] == losses
            assert same_bits(run.parameters, parameters) == []
    _, _, flat = one_process.train(NAME, world_size=2, num_steps=NUM_STEPS)
    assert same_bits(oracle[2], flat) != [], "the one exception to the same bits"
