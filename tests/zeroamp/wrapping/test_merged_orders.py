"""Merged units whose modules do not all run, or not one after the other: the same bits as without merging."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models.small import build
from tests.processes.training import check_same_run, config, train

NUM_STEPS = 4
BLOCK = 10_272 + 64
ALL = {"reduce_bucket_size": 10**9}
PAIR = {"reduce_bucket_size": 2 * BLOCK}
NONE = {"reduce_bucket_size": 0}


def _four_blocks(model):
    other = build("llama_untied")
    model.blocks.append(other.blocks[0])


def _logits(model, run):
    """Replace the blocks' loop by `run`: (blocks, x, the number of the forward) -> x."""
    calls = []

    def logits(tokens, num_ranks=1):
        calls.append(0)
        x = run(model.blocks, model.embed(tokens), (len(calls) - 1) // model.num_ranks_in_this_process)
        return model.head(model.norm(x))

    model.logits = logits


def exit_early(blocks, x, _):
    """All run, and the loss comes from the output of the first."""
    outputs = []
    for block in blocks:
        x = block(x)
        outputs.append(x)
    return outputs[0]


def exit_after_each(blocks, x, step):
    """All run, and the loss comes from another one in each step."""
    outputs = []
    for block in blocks:
        x = block(x)
        outputs.append(x)
    return outputs[step % len(outputs)]


def stop_at_each(blocks, x, step):
    """Only the first ones run."""
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
    """The last of each pair is not in the graph of the others."""
    for index, block in enumerate(blocks):
        x = x + block(x.detach()) if index % 2 else block(x)
    return x


def last_unused(blocks, x, _):
    """The second runs without gradients."""
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
        x = checkpoint(block, x, use_reentrant=True) if index == 1 else block(x)
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


def _attach(model, run):
    model.num_ranks_in_this_process = 1
    _logits(model, run)


def _train(run, stage, fields, options):
    return train(
        "llama_untied",
        config(stage, clip=0.5, **options),
        NUM_STEPS,
        fields=fields,
        prepare_before=_four_blocks,
        prepare=functools.partial(_attach, run=run),
    )


@pytest.mark.parametrize("run", ORDERS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("fields", [PAIR, ALL], ids=["pair", "all"])
def test_order(ranks2, run, stage, fields):
    expected = ranks2.run(_train, run, stage, NONE, {})
    for ours, theirs in zip(ranks2.run(_train, run, stage, fields, {}), expected, strict=True):
        check_same_run(ours, theirs)
