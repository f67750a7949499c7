"""Scales of float8 weights, and the error that they leave."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.oracles.float8_weights import scale_of

pytest.importorskip("torchao", reason="the tensors are torchao's")

AMOUNTS = (3e-6, 0.02, 1.0, 700.0)


def _shards(rank):
    generator = torch.Generator().manual_seed(rank)
    random = [torch.randn(8, 16, generator=generator) * amount * (1 + rank) for amount in AMOUNTS]
    return [*random, torch.zeros(2, 4), torch.full((2, 2), float("nan") if rank == 0 else 1.0)]


def _scales():
    from zeroamp.float8.scaled_weights import Float8Scales, Float8Weight

    shards = [SimpleNamespace(padded=shard, tensors=(shard,)) for shard in _shards(dist.get_rank())]
    seen = []
    listener = SimpleNamespace(on_collective=seen.append)
    scales = Float8Scales(shards, dist.group.WORLD, [listener], lambda: False)
    scales.compute()
    first = [scales.of(index) for index in range(len(shards))]
    weights = [Float8Weight(shard=shard, scale=lambda index=index: first[index]) for index, shard in enumerate(shards)]
    values = []
    for weight in weights:
        (sent,), (scale,) = weight.fsdp_pre_all_gather(None)
        values.append(sent.float() / scale)
    return [float(scale) for scale in first], values, {(each.collective, each.tensor.numel()) for each in seen}


def test_scales_are_powers_of_two_of_the_whole_weight_and_errors_are_bounded(ranks2):
    results = ranks2.run(_scales)
    whole = [torch.cat(pair) for pair in zip(_shards(0), _shards(1), strict=True)]
    for rank, (scales, values, issued) in enumerate(results):
        assert issued == {("all_reduce", len(whole))}
        assert scales[:-1] == [scale_of(each) for each in whole[:-1]]
        for exact, value, of_both in zip(_shards(rank)[:5], values[:5], whole[:5], strict=True):
            largest = of_both.abs().max()
            error = (value - exact).abs()
            assert torch.all((error <= 2**-4 * exact.abs()) | (error <= 2**-17 * largest))
    assert results[0][1][5].isnan().all()  # what is no number stays none
