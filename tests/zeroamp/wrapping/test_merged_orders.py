"""Merged units with modules that are left out or run in another order have the same bits as without merging."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.training import check_run, check_same_run, config, train, wrapped
from tests.selection import slow_but

NUM_STEPS = 4
BLOCK = 10_272 + 64
ALL = {"reduce_bucket_size": 10**9}
PAIR = {"reduce_bucket_size": 2 * BLOCK}
NONE = {"reduce_bucket_size": 0}


def _four_blocks(model):
    other = build("llama_untied")
    model.blocks.append(other.blocks[0])


def _logits(model, run):
    """Replace the loop over the blocks by `run`: (blocks, x, number of the forward) -> x."""
    calls = []

    def logits(tokens):
        calls.append(0)
        x = run(model.blocks, model.embed(tokens), (len(calls) - 1) // model.num_ranks_in_this_process)
        return model.head(model.norm(x))

    model.logits = logits


def exit_early(blocks, x, _):
    """All blocks run. The loss depends on the output of the first one only."""
    outputs = []
    for block in blocks:
        x = block(x)
        outputs.append(x)
    return outputs[0]


def exit_after_each(blocks, x, step):
    """All blocks run. In each step the loss depends on the output of another block."""
    outputs = []
    for block in blocks:
        x = block(x)
        outputs.append(x)
    return outputs[step % len(outputs)]


def stop_at_each(blocks, x, step):
    """Only the first blocks run, in each step another number of them."""
    for block in list(blocks)[: 1 + step % len(blocks)]:
        x = block(x)
    return x


def start_at_each(blocks, x, step):
    for block in list(blocks)[step % len(blocks) :]:
        x = block(x)
    return x


def side_by_side(blocks, x, _):
    return x + sum(block(x) for block in blocks)


def side_by_side_backwards(blocks, x, _):
    return x + sum(block(x) for block in reversed(blocks))


def last_detached(blocks, x, _):
    """The last block of each pair is not in the graph of the other blocks."""
    for index, block in enumerate(blocks):
        x = x + block(x.detach()) if index % 2 else block(x)
    return x


def last_unused(blocks, x, _):
    """The second block runs without gradients."""
    for index, block in enumerate(blocks):
        if index == 1:
            with torch.no_grad():
                x = x + block(x)
        else:
            x = block(x)
    return x


def first_unused(blocks, x, _):
    for index, block in enumerate(blocks):
        if index == 0:
            with torch.no_grad():
                x = x + block(x)
        else:
            x = block(x)
    return x


def backwards(blocks, x, _):
    for block in reversed(blocks):
        x = block(x)
    return x


def interleaved(blocks, x, _):
    for index in (0, 2, 1, 3):
        x = blocks[index](x)
    return x


def in_another_order_each_step(blocks, x, step):
    for index in range(len(blocks)):
        x = blocks[(index * 3 + step) % len(blocks)](x)
    return x


def each_twice(blocks, x, _):
    for block in blocks:
        x = block(block(x))
    return x


def all_twice(blocks, x, _):
    for _ in range(2):
        for block in blocks:
            x = block(x)
    return x


def first_again_at_the_end(blocks, x, _):
    for block in (*blocks, blocks[0]):
        x = block(x)
    return x


def second_again_at_the_end(blocks, x, _):
    for block in (*blocks, blocks[1]):
        x = block(x)
    return x


def reentrant(blocks, x, _):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True) if x.requires_grad else block(x)
    return x


def second_reentrant(blocks, x, _):
    for index, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=True) if index == 1 and x.requires_grad else block(x)
    return x


def recomputed(blocks, x, _):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def two_recomputed_together(blocks, x, _):
    for start in (0, 2):
        x = checkpoint(nn.Sequential(*blocks[start : start + 2]), x, use_reentrant=False)
    return x


def middle_two_recomputed_together(blocks, x, _):
    x = blocks[0](x)
    x = checkpoint(nn.Sequential(*blocks[1:3]), x, use_reentrant=False)
    return blocks[3](x)


def skipped_at_random(blocks, x, step):
    kept = torch.rand(len(blocks), generator=torch.Generator().manual_seed(step)) > 0.4
    for block, keep in zip(blocks, kept, strict=True):
        x = block(x) if keep else x
    return x


def skip_the_second(blocks, x, _):
    for index in (0, 2, 3):
        x = blocks[index](x)
    return x


def stop_after_the_first(blocks, x, _):
    return blocks[0](x)


ORDERS = [
    exit_early,
    exit_after_each,
    stop_at_each,
    start_at_each,
    side_by_side,
    side_by_side_backwards,
    last_detached,
    last_unused,
    first_unused,
    backwards,
    interleaved,
    in_another_order_each_step,
    each_twice,
    all_twice,
    first_again_at_the_end,
    second_again_at_the_end,
    reentrant,
    second_reentrant,
    recomputed,
    two_recomputed_together,
    middle_two_recomputed_together,
    skipped_at_random,
]

FAST = [exit_after_each, side_by_side, interleaved, second_reentrant, skipped_at_random]


def _attach(model, run, num_ranks=1):
    model.num_ranks_in_this_process = num_ranks
    _logits(model, run)


def _evaluate(model, name):
    with torch.no_grad():
        loss_of(model, batch(name, 0))


def _train(run, stage, fields, options, mesh_shape=None, evaluates=False):
    return train(
        "llama_untied",
        config(stage, clip=0.5, **options),
        NUM_STEPS,
        mesh_shape=mesh_shape,
        fields=fields,
        prepare_before=_four_blocks,
        prepare=functools.partial(_attach, run=run),
        between=_evaluate if evaluates else None,
    )


@pytest.fixture(scope="module")
def check():
    """Return a function that compares a run with merged units to one without. The latter is trained once per case."""
    without = {}

    def compare(ranks, run, stage, options, *, fields=PAIR, **kwargs):
        case = repr((ranks.world_size, run.__name__, stage, options, kwargs))
        if case not in without:
            without[case] = ranks.run(_train, run, stage, NONE, options, **kwargs)
        merged = ranks.run(_train, run, stage, fields, options, **kwargs)
        for ours, theirs in zip(merged, without[case], strict=True):
            check_same_run(ours, theirs)

    return compare


@pytest.mark.parametrize("run", slow_but(ORDERS, *FAST), ids=lambda run: run.__name__)
@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
@pytest.mark.parametrize("fields", slow_but([PAIR, ALL], PAIR), ids=str)
def test_the_bits_are_those_without_merging(check, ranks2, run, stage, fields):
    check(ranks2, run, stage, {}, fields=fields)


@pytest.mark.parametrize("run", ORDERS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.slow
def test_with_typed_groups_accumulation_and_evaluations(check, ranks2, run, stage):
    check(ranks2, run, stage, {"threshold": 0, "accumulation": 2}, evaluates=True)


def _prepare(model, run):
    _four_blocks(model)
    _attach(model, run, num_ranks=2)


TWICE = [each_twice, all_twice, first_again_at_the_end, second_again_at_the_end, interleaved, exit_early]


@pytest.mark.parametrize("run", TWICE, ids=lambda run: run.__name__)
@pytest.mark.slow
def test_sums_of_micro_batches_are_reduced_once(ranks2, run):
    # At stage 1, a unit that runs several times would reduce the sum of the first micro-batches apart from the last.
    options = {"threshold": 0, "accumulation": 2, "comm": "fp32"}
    expected = one_process.train(
        "llama_untied",
        world_size=2,
        num_steps=NUM_STEPS,
        accumulation=2,
        clip=0.5,
        prepare=functools.partial(_prepare, run=run),
    )
    for rank, ours in enumerate(ranks2.run(_train, run, 1, PAIR, options)):
        check_run(ours, rank, expected)


@pytest.mark.parametrize("run", ORDERS, ids=lambda run: run.__name__)
@pytest.mark.slow
def test_with_a_secondary_partition_and_live_parameters(check, ranks4, run):
    # Neither option changes bits, so one run without merging and without the option serves both.
    check(ranks4, run, 3, {}, fields={**PAIR, "hpz_partition_size": 2})
    check(ranks4, run, 3, {}, fields={**PAIR, "max_live_parameters": 2 * BLOCK, "prefetch_bucket_size": 4 * BLOCK})


@pytest.mark.parametrize("run", ORDERS, ids=lambda run: run.__name__)
@pytest.mark.slow
def test_with_replicas(check, ranks4, run):
    check(ranks4, run, 3, {"accumulation": 2}, mesh_shape=(2, 2))


def _unsharded_blocks(run):
    """Return for each block's forward the blocks that are unsharded while it runs."""
    model = wrapped("llama_untied", config(3), fields=PAIR, prepare_before=_four_blocks)
    _attach(model, run)
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []

    def note(_module, _args, _output):
        found.append([i for i, block in enumerate(model.blocks) if not isinstance(block.qkv.weight, DTensor)])

    for block in model.blocks:
        block.qkv.register_forward_hook(note)
    loss = loss_of(model, batch("llama_untied", 0))
    after = [i for i, block in enumerate(model.blocks) if not isinstance(block.qkv.weight, DTensor)]
    step.backward(loss)
    return found, after


def test_a_merged_unit_is_resharded_when_another_unit_begins(ranks2):
    for found, after in ranks2.run(_unsharded_blocks, interleaved):
        assert (found, after) == ([[0, 1], [2, 3], [0, 1], [2, 3]], [])
    for found, after in ranks2.run(_unsharded_blocks, skip_the_second):
        assert (found, after) == ([[0, 1], [2, 3], [2, 3]], [])
    for found, after in ranks2.run(_unsharded_blocks, stop_after_the_first):
        assert (found, after) == ([[0, 1]], [])


def _goes_on(fields):
    """Train after a forward that raised, and after calls of a block outside of the model's forward."""
    model = wrapped("llama_untied", config(3, threshold=0), fields=fields, prepare_before=_four_blocks)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for index in range(3):
        inputs = batch("llama_untied", 2 * index + dist.get_rank())
        loss = loss_of(model, inputs)
        step.backward(loss)
        step.step()
        with torch.no_grad(), step.autocast():
            outside = model.blocks[index % 2](torch.ones(1, 4, 32))
        losses += [float(loss.detach()), float(outside.sum())]
        assert isinstance(model.blocks[0].qkv.weight, DTensor)
    return losses


def test_a_block_that_is_called_by_itself(ranks2):
    assert ranks2.run(_goes_on, PAIR) == ranks2.run(_goes_on, NONE)


def _after_an_error(fields, stage):
    model = wrapped("llama_untied", config(stage), fields=fields, prepare_before=_four_blocks)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for index in range(3):
        inputs = batch("llama_untied", 2 * index + dist.get_rank())
        with torch.no_grad():  # after one with gradients that raised, FSDP2 cannot go on
            handle = model.blocks[1].register_forward_pre_hook(_raise)
            with contextlib.suppress(ZeroDivisionError):
                loss_of(model, inputs)
            handle.remove()
        loss = loss_of(model, inputs)
        step.backward(loss)
        losses += [float(loss.detach()), step.step().grad_norm]
    return losses


def _raise(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_a_forward_after_one_that_raised(ranks2, stage):
    assert ranks2.run(_after_an_error, PAIR, stage) == ranks2.run(_after_an_error, NONE, stage)
