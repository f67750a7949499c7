"""In which order the gradients of an activation are added that several units read.

FSDP2 passes a unit's inputs through an autograd function, which marks the end of the unit's backward. The gradients
that the unit itself gives to an input are added there first, and their sum is then added to those of other readers.
Without units, autograd adds one after the other, the last reader's first. Both are the same additions in the same order
unless a unit reads an activation twice that something after the unit reads too.
"""

import pytest
import torch
import torch.distributed as dist

from tests.models.small import batch, build
from tests.oracles import one_process, plain_fsdp2
from tests.processes.training import check_run, check_same_run, config, same_bits, train
from tests.selection import slow_but

NUM_STEPS = 5
UNITS = [f"{part}.{index}" for part in ("down", "up", "side") for index in range(3)]


def _all_stages(name):
    return [train(name, config(stage), NUM_STEPS) for stage in (0, 1, 2, 3)]


def _plain(name):
    def losses_of(model):
        for index in range(NUM_STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                yield model(batch(name, index * 2 + dist.get_rank()))

    return plain_fsdp2.train(build(name), UNITS, losses_of, world_size=2)


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


def _one_process(name, prepare=None):
    return one_process.train(name, world_size=2, num_steps=NUM_STEPS, prepare=prepare)


@pytest.mark.parametrize("name", slow_but(["skips", "residual_skips"], "residual_skips"))
def test_all_stages_and_fsdp2_alone_add_in_the_same_order(ranks2, name):
    theirs = ranks2.run(_plain, name)
    for rank, runs in enumerate(ranks2.run(_all_stages, name)):
        losses, parameters = theirs[rank]
        for run in runs:
            check_same_run(run, runs[0])
            assert [loss for (loss,) in run.losses] == losses
            assert same_bits(run.parameters, parameters) == []


@pytest.mark.slow
def test_units_that_read_an_activation_once_give_the_bits_of_one_process(ranks2):
    oracle = _one_process("skips")
    for rank, runs in enumerate(ranks2.run(_all_stages, "skips")):
        check_run(runs[-1], rank, oracle)


def test_a_unit_that_reads_a_skip_twice_gives_the_bits_of_one_process_that_adds_per_unit(ranks2):
    flat, per_unit = _one_process("residual_skips"), _one_process("residual_skips", _pass_inputs_through_a_node)
    for rank, runs in enumerate(ranks2.run(_all_stages, "residual_skips")):
        check_run(runs[-1], rank, per_unit)
        assert same_bits(runs[-1].parameters, flat[2]) != []  # the one exception to the same bits
