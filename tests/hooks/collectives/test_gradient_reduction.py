"""`GroupReduceScatter` against sums written out."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.oracles.one_process import tree
from zeroamp.hooks._torch.dispatch import storage_key
from zeroamp.hooks.collectives import gradient_reduction as module
from zeroamp.hooks.collectives.gradient_reduction import GroupReduceScatter, ReceiveBuffers

NUMEL = 1000


def _gradient(rank, world_size):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL * world_size, generator=generator).to(torch.bfloat16)


def _comm(accumulate, communication_dtype=torch.bfloat16, *, world_size, reduce_dtype=None, **options):
    sums_here = accumulate == "fp32"
    reduce_dtype = reduce_dtype or (torch.float32 if sums_here else communication_dtype)
    return GroupReduceScatter(
        communication_dtype=communication_dtype,
        reduce_dtype=reduce_dtype,
        dtypes_of_sums=(communication_dtype, reduce_dtype),
        collective="all_to_all" if sums_here else "reduce_scatter",
        op=dist.ReduceOp.SUM if communication_dtype == torch.float16 else dist.ReduceOp.AVG,
        world_size=world_size,
        **options,
    )


def _on_an_accelerator(sizes, num_ranks):
    """Reduce shards of each size with the rows of an accelerator. Return the results and the rows' bytes."""
    rank, results, row_bytes = dist.get_rank(), [], set()
    group = dist.new_group(range(num_ranks))
    if rank >= num_ranks:
        return None

    original = module.row_length

    def row_length(numel, dtype, _device):
        length = original(numel, dtype, torch.device("cuda"))
        row_bytes.add(length * dtype.itemsize)
        return length

    shared = ReceiveBuffers()
    with mock.patch.object(module, "row_length", row_length):
        for numel in sizes:
            for dtype in (torch.bfloat16, torch.float32):
                comm = _comm("fp32", dtype, world_size=num_ranks, buffers=shared, shares_buffers=numel % 2 == 0)
                sent = comm.allocate((numel * num_ranks,), dtype=torch.float32, device=torch.device("cpu"))
                result = comm.allocate((numel,), dtype=torch.float32, device=torch.device("cpu"))
                sent.copy_(_gradient(rank, num_ranks)[: len(sent)])
                comm(result, sent, group, dist.ReduceOp.AVG)
                whole = _gradient(rank, num_ranks)[: numel + 1].float()
                module.all_reduce_in_tree_order(whole, group, num_ranks)
                results.append((result, whole))
    return results, row_bytes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_of_a_multiple_of_16_bytes_change_no_bit(ranks4, num_ranks):
    sizes = range(1, 41)
    of_ranks = ranks4.run(_on_an_accelerator, sizes, num_ranks)[:num_ranks]
    assert all(length % 16 == 0 for _, row_bytes in of_ranks for length in row_bytes)
    gradients = [_gradient(rank, num_ranks) for rank in range(num_ranks)]
    for place, numel in enumerate(numel for numel in sizes for _ in range(2)):
        results = [results[place] for results, _ in of_ranks]
        expected = tree([gradient[: numel * num_ranks] for gradient in gradients]) / num_ranks
        assert torch.equal(torch.cat([shard for shard, _ in results]), expected), numel
        expected = tree([gradient[: numel + 1].float() for gradient in gradients]) / num_ranks
        assert all(torch.equal(whole, expected) for _, whole in results), numel


def _allocated(comm, numel):
    return comm.allocate((numel,), dtype=torch.float32, device=torch.device("cpu")).dtype


def test_an_abandoned_reduction_does_not_mix_up_the_next(monkeypatch):
    """An abandoned reduction or an allocation that fails does not mix up the next."""
    comm = _comm("fp32", world_size=2)
    assert _allocated(comm, 8) == torch.bfloat16
    assert [_allocated(comm, n) for n in (8, 4)] == [torch.bfloat16, torch.float32]  # the first has no output
    comm = _comm("fp32", world_size=1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _allocated(comm, 8)
    assert [_allocated(comm, 8) for _ in range(4)] == [torch.bfloat16, torch.float32] * 2


def _average_of_equals(value, is_replicated):
    world_size = dist.get_world_size()
    reduce_dtype = torch.float32 if is_replicated else torch.float16
    comm = _comm("native", torch.float16, world_size=world_size, reduce_dtype=reduce_dtype)
    sent = comm.allocate((NUMEL * world_size,), dtype=torch.float32, device=torch.device("cpu"))
    result = comm.allocate((NUMEL,), dtype=torch.float32, device=torch.device("cpu"))
    sent.fill_(value)
    comm(result, sent, dist.group.WORLD, dist.ReduceOp.AVG)
    return result.dtype, result.float().unique().tolist()


@pytest.mark.parametrize("is_replicated", [False, True])
def test_a_native_fp16_average_neither_overflows_nor_underflows(ranks4, is_replicated):
    large, small = 30_000.0, 2.0**-23  # 4 x 30,000 is beyond float16; a quarter of 2^-23 is below its smallest
    dtype = torch.float32 if is_replicated else torch.float16
    assert ranks4.run(_average_of_equals, large, is_replicated)[0] == (dtype, [large])
    assert ranks4.run(_average_of_equals, small, is_replicated)[0] == (dtype, [small])


class _Receives(torch.autograd.Function):
    """Asks for buffers of some sizes in its backward; raises where told so."""

    @staticmethod
    def forward(ctx, x, buffers, sizes, raises):
        ctx.given = buffers, sizes, raises
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        buffers, sizes, raises = ctx.given
        taken = [buffers.like(torch.empty(size, dtype=torch.bfloat16)) for size in sizes]
        RECEIVED.append([buffer.data_ptr() for buffer in taken])
        if raises:
            raise ArithmeticError("in the backward")
        return grad, None, None, None


RECEIVED = []


def _receive(buffers, sizes, raises=False):
    """Run a backward, return the addresses that it received at."""
    _Receives.apply(torch.ones((), requires_grad=True), buffers, sizes, raises).backward()
    return RECEIVED.pop()


@pytest.mark.parametrize("raises", [False, True])
def test_receive_buffers_are_dropped_at_the_end(raises):
    """What a backward received into is dropped at its end or at that of the next."""
    buffers = ReceiveBuffers()
    if raises:
        with pytest.raises(ArithmeticError):
            _receive(buffers, [20], raises=True)
        assert buffers._buffers  # nobody dropped it
        RECEIVED.clear()
    assert len(set(_receive(buffers, [20, 10, 20]))) == 1
    assert not buffers._buffers


def test_an_accelerator_keeps_what_it_received_into_for_the_next_backward():
    buffers = ReceiveBuffers()
    on_meta = lambda numel: torch.empty(numel, dtype=torch.bfloat16, device="meta")  # noqa: E731
    first = buffers.like(on_meta(20))
    buffers.release()  # as before an own unit
    _receive(buffers, [30])  # on the CPU: its buffer goes at the end of the backward
    assert [key[1].type for key in buffers._buffers] == ["meta"]
    assert storage_key(buffers.like(on_meta(10))) == storage_key(first)
    assert storage_key(buffers.like(on_meta(21))) != storage_key(first)
    assert len(buffers._buffers) == 1
