"""`WireReduceScatter` against sums written out."""

import pytest
import torch
import torch.distributed as dist

from zeroamp.hooks import WireReduceScatter

NUMEL = 1000


def _gradient(rank, world_size):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL * world_size, generator=generator).to(torch.bfloat16)


def _reduce(accumulate, op_name):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    comm = WireReduceScatter(torch.bfloat16, accumulate, world_size)
    sent = comm.allocate((NUMEL * world_size,), dtype=torch.float32, device=torch.device("cpu"))
    result = comm.allocate((NUMEL,), dtype=torch.float32, device=torch.device("cpu"))
    assert sent.dtype == torch.bfloat16  # no staging copy in fp32
    sent.copy_(_gradient(rank, world_size))
    comm(result, sent, dist.group.WORLD, getattr(dist.ReduceOp, op_name))
    return result


@pytest.mark.parametrize("op", ["AVG", "SUM"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_in_fp32_in_rank_order(request, world_size, op):
    results = request.getfixturevalue(f"ranks{world_size}").run(_reduce, "fp32", op)
    total = torch.zeros(NUMEL * world_size)
    for rank in range(world_size):
        total += _gradient(rank, world_size).float()
    expected = total / world_size if op == "AVG" else total
    assert torch.equal(torch.cat(results), expected)


def test_native_sums_in_the_wire_dtype(ranks4):
    results = ranks4.run(_reduce, "native", "AVG")
    assert all(result.dtype == torch.bfloat16 for result in results)
    exact = sum(_gradient(rank, 4).double() for rank in range(4)) / 4
    error = (torch.cat(results).double() - exact).norm() / exact.norm()
    assert 1e-4 < error < 1e-2  # three roundings to 8 bits each; an fp32 sum has 1e-8


def test_an_abandoned_reduction_does_not_mix_up_the_next():
    comm = WireReduceScatter(torch.bfloat16, "fp32", 2)
    allocate = lambda numel: comm.allocate((numel,), dtype=torch.float32, device=torch.device("cpu")).dtype  # noqa: E731
    assert allocate(8) == torch.bfloat16
    assert [allocate(8), allocate(4)] == [torch.bfloat16, torch.float32]  # the first one's output was never asked for


def test_one_rank_alone_is_input_then_output():
    comm = WireReduceScatter(torch.bfloat16, "fp32", 1)
    dtypes = [comm.allocate((8,), dtype=torch.float32, device=torch.device("cpu")).dtype for _ in range(4)]
    assert dtypes == [torch.bfloat16, torch.float32] * 2
