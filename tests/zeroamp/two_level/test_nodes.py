"""Reductions and gathers in two levels against sums and tensors written out."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.oracles.one_process import tree
from zeroamp.hooks.collectives.gradient_reduction import all_reduce_in_tree_order, sum_over_ranks
from zeroamp.two_level import nodes
from zeroamp.two_level.nodes import Nodes

NUMEL = 123
BOUND = 2.0**-8  # of partial sums in bf16


def _nodes(num_inside, partials):
    rank, size = dist.get_rank(), dist.get_world_size()
    inside = list(range(rank - rank % num_inside, rank - rank % num_inside + num_inside))
    members = (inside, list(range(rank % num_inside, size, num_inside)))
    groups = [dist.new_group(ranks, use_local_synchronization=True) for ranks in members]
    return Nodes(inside=groups[0], across=groups[1], partials=partials)


def _gradient(rank, size, dtype):
    return torch.randn(NUMEL * size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _reduced(num_inside, partials, dtype):
    """This rank's sum of a reduction, the sum of an all-reduce over as many numbers less 5, and all gathered chunks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups, total = _nodes(num_inside, partials), torch.empty(NUMEL)
    chunks = _gradient(rank, size, dtype)
    sum_over_ranks(chunks, torch.empty_like(chunks), total, size, dist.group.WORLD, groups)
    everywhere = _gradient(rank, size, torch.float32)[:-5].clone()
    all_reduce_in_tree_order(everywhere, dist.group.WORLD, 3, groups)
    gathered = []
    for async_op in (False, True):
        output = torch.empty(NUMEL * size)
        own = output[rank * NUMEL : (rank + 1) * NUMEL]  # in place, as FSDP2 does
        own.copy_(_gradient(rank, size, torch.float32)[:NUMEL])
        work = groups.all_gather(output, own, async_op=async_op)
        assert (work is not None) == async_op
        if work is not None:
            assert work.wait()
        gathered.append(output)
    return total, everywhere, gathered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_levels_have_the_bits_of_the_tree(ranks4, dtype):
    by_rank = ranks4.run(_reduced, 2, "fp32", dtype)
    expected = tree([_gradient(rank, 4, dtype) for rank in range(4)]) / 4
    assert torch.equal(torch.cat([total for total, _, _ in by_rank]), expected)
    summed = tree([_gradient(rank, 4, torch.float32)[:-5] for rank in range(4)]) / 3
    chunks = torch.cat([_gradient(rank, 4, torch.float32)[:NUMEL] for rank in range(4)])
    for _, everywhere, gathered in by_rank:
        assert torch.equal(everywhere, summed)
        assert all(torch.equal(each, chunks) for each in gathered)


def _in_pieces(num_bytes, numels):
    """Sums of shards of several sizes in pieces of `num_bytes`, and the all-to-alls in the order of this rank."""
    rank, size, calls, sums = dist.get_rank(), dist.get_world_size(), [], []
    groups = _nodes(2, "fp32")
    all_to_all = dist.all_to_all_single

    def noting(output, sent, group, async_op):
        calls.append(("inside" if group is groups.inside else "across", output.numel(), async_op))
        return all_to_all(output, sent, group=group, async_op=async_op)

    with mock.patch.object(nodes, "BYTES_OF_A_PIECE", num_bytes), mock.patch.object(dist, "all_to_all_single", noting):
        for numel in numels:
            for padding in (8, 0):
                chunks = torch.full((size, numel + padding), torch.nan, dtype=torch.bfloat16)
                chunks[:, :numel] = _gradient(rank, size, torch.bfloat16).view(size, -1)[:, :numel]
                chunks, total = chunks.flatten(), torch.empty(numel)
                sum_over_ranks(chunks, torch.empty_like(chunks), total, size, dist.group.WORLD, groups)
                sums.append(total)
    return sums, calls


@pytest.mark.parametrize("num_pieces", [2, 4])
def test_pieces_change_no_bit_and_are_sent_in_one_order(ranks4, num_pieces):
    numels = (1, 16, 40, NUMEL)
    by_rank = ranks4.run(_in_pieces, NUMEL * 4 * 2 // num_pieces, numels)
    for place, numel in enumerate(numel for numel in numels for _ in range(2)):
        gradients = [_gradient(rank, 4, torch.bfloat16).view(4, -1)[:, :numel].flatten() for rank in range(4)]
        assert torch.equal(torch.cat([sums[place] for sums, _ in by_rank]), tree(gradients) / 4)
    (calls, *others) = [calls for _, calls in by_rank]
    assert all(other == calls for other in others)
    of_the_largest = [where for where, _, is_async in calls if is_async][-2 * num_pieces :]
    across = ["across"] * (num_pieces - 2)
    assert of_the_largest == ["inside", *[at for one in across for at in ("inside", one)], "inside", "across", "across"]


def test_rounded_partial_sums_are_those_of_the_nodes_rounded_once(ranks4):
    by_rank = ranks4.run(_reduced, 2, "bf16", torch.bfloat16)
    first, second = (tree([_gradient(rank, 4, torch.bfloat16) for rank in node]) for node in ((0, 1), (2, 3)))
    found, exact = torch.cat([total for total, _, _ in by_rank]) * 4, first + second
    assert not torch.equal(found, exact)
    assert ((found - exact).abs() <= BOUND * (first.abs() + second.abs()) * (1 + 2**-20)).all()
