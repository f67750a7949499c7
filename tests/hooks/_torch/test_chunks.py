"""What `chunks_on_demand` changes in FSDP2, against FSDP2 without it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroamp.hooks._torch.fsdp import LazyChunks, chunks_on_demand, groups_of

SHAPES = [(8,), (7, 3), (2, 12), (1, 4), (9, 5, 2)]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 8, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_chunks_are_those_of_fsdp2(shape, num_chunks):
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for dim in range(len(shape)):
        expected = _fsdp_common._chunk_with_empty(tensor, num_chunks, dim=dim)
        found = LazyChunks(tensor, num_chunks, dim)
        assert len(found) == len(expected) == num_chunks
        for chunk, own in zip(expected, found, strict=True):
            assert own.shape == chunk.shape
            assert own.stride() == chunk.stride()
            assert own.storage_offset() == chunk.storage_offset()
            assert torch.equal(own, chunk)
        assert torch.equal(found[-1], expected[-1])
        assert [chunk.shape for chunk in found[1:]] == [chunk.shape for chunk in expected[1:]]
        with pytest.raises(IndexError):
            found[num_chunks]


def _sharded(rank, num_ranks, dim, reshard_after_forward):
    """Everything that FSDP2 remembers of the parameters of a model, on one of many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 36, bias=False))

        def place(parameter):
            return Shard(dim) if parameter.dim() > dim and parameter.size(dim) % num_ranks == 0 else Shard(0)

        mesh = init_device_mesh("cpu", (num_ranks,))
        fully_shard(model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=reshard_after_forward)
        (group,) = groups_of(model._get_fsdp_state())
        return [
            (
                parameter.sharded_param.to_local().clone(),
                parameter._sharded_param_data.clone(),
                parameter.sharded_param.placements,
                parameter.sharded_size,
                parameter.padded_sharded_param_size,
                parameter.contiguous_sharded_stride,
                getattr(parameter, "sharded_post_forward_size", None),
            )
            for parameter in group.fsdp_params
        ]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reshard_after_forward", [True, 2, False])
@pytest.mark.parametrize(("num_ranks", "dim"), [(2, 0), (4, 0), (10, 0), (4, 1), (64, 0)])
def test_shards_and_sizes_are_those_of_fsdp2(num_ranks, dim, reshard_after_forward):
    for rank in {0, 1, num_ranks // 2, num_ranks - 1}:
        expected = _sharded(rank, num_ranks, dim, reshard_after_forward)
        with chunks_on_demand():
            found = _sharded(rank, num_ranks, dim, reshard_after_forward)
        for params in zip(expected, found, strict=True):
            for one, other in zip(*params, strict=True):
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_parameter_costs_as_many_tensors_with_many_ranks_as_with_few():
    made = []

    class Counting(LazyChunks):
        def __getitem__(self, index):
            made.append(index)
            return super().__getitem__(index)

    original = _fsdp_param._chunk_with_empty
    with chunks_on_demand():
        assert isinstance(_fsdp_param._chunk_with_empty(torch.ones(4), 2, dim=0), LazyChunks)
        assert isinstance(_fsdp_param._chunk_with_empty(torch.ones(0, 3), 2, dim=0), list)
    assert _fsdp_param._chunk_with_empty is original
    with pytest.raises(IndexError), chunks_on_demand():
        _fsdp_param._chunk_with_empty(torch.ones(4), 2, dim=0)[2]
    assert _fsdp_param._chunk_with_empty is original

    for num_ranks in (2, 4096):
        made.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_fsdp_param, "_chunk_with_empty", Counting)
            _sharded(1, num_ranks, 0, True)
        assert sorted(made) == [0] * 3 + [1] * 6  # three parameters: the shard, the first, the shard after the forward
