"""`zeroamp.symmetric_memory`: what it delegates to FSDP2, and what it refuses. No GPU is used."""

import logging

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import zeroamp
from tests.processes.training import config, policy, same_bits, train
from tests.selection import slow_but
from zeroamp.hooks._torch import symmetric_memory as of_torch
from zeroamp.hooks._torch.fsdp import AllGather, all_gather
from zeroamp.wrapping import symmetric_memory
from zeroamp.wrapping.two_levels import MeshNodes

needs_class = pytest.mark.skipif(
    not of_torch.has_symmetric_all_gather(), reason="FSDP2 has no all-gather in symmetric memory before torch 2.13"
)
SHARED = {"zeroamp": {"symmetric_memory": True}}


class _Gather(AllGather):
    """Replaces FSDP2's class: allocates ordinary memory, and records each output."""

    def __init__(self, group):
        self.allocated, self.gathered, self.made_for = [], [], group.group_name

    def allocate(self, size, *, dtype, device):
        self.allocated.append(torch.empty(size, dtype=dtype, device=device))
        return self.allocated[-1]

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        assert group.group_name == self.made_for
        assert output_tensor is self.allocated[-1]
        self.gathered.append(output_tensor.numel())
        return all_gather(output_tensor, input_tensor, group, async_op=async_op)


def _trained(stage, mesh_shape):
    """A run with the fake class, one without, and the number of all-gathers that it ran and that zeroamp counted."""
    made, original = [], (_fsdp_collectives.SymmMemAllGather, symmetric_memory._why_not)
    _fsdp_collectives.SymmMemAllGather = lambda group: made.append(_Gather(group)) or made[-1]
    symmetric_memory._why_not = lambda *_: ""
    try:
        ours = train("llama_tied", config(stage, threshold=0, **SHARED), 2, mesh_shape=mesh_shape)
    finally:
        _fsdp_collectives.SymmMemAllGather, symmetric_memory._why_not = original
    theirs = train("llama_tied", config(stage, threshold=0), 2, mesh_shape=mesh_shape)
    differing = same_bits(ours.parameters, theirs.parameters)
    return ours.losses == theirs.losses and differing == [], [len(gather.gathered) for gather in made]


@needs_class
@pytest.mark.parametrize("mesh_shape", slow_but([None, (2, 2)], None))
def test_all_gathers_of_all_groups_run_in_it_with_the_same_bits(ranks4, mesh_shape):
    for is_same, (num_gathers,) in ranks4.run(_trained, 3, mesh_shape):
        assert is_same
        assert num_gathers > 10  # the first is that of `wrap_model`


@needs_class
def test_nothing_is_made_where_one_rank_holds_whole_parameters(ranks2):
    assert ranks2.run(_trained, 0, None)[0] == (True, [])


class _CudaMesh:
    device_type, ndim = "cuda", 1

    def get_group(self, axis):
        return None


@needs_class
@pytest.mark.parametrize(
    ("cfg", "fields", "nodes", "reason"),
    [
        (SHARED, {"hpz_partition_size": 2}, MeshNodes(), "zero_hpz_partition_size is 2.* Remove one of the keys"),
        (SHARED, {}, MeshNodes(gathers={0: None}), 'all-gathers run in two levels .*ranks_per_node to "off"'),
    ],
)
def test_other_keys_that_do_not_go_with_it_are_named(monkeypatch, cfg, fields, nodes, reason):
    monkeypatch.setattr(symmetric_memory, "is_nccl", lambda *_: True)
    with pytest.raises(zeroamp.ConfigError, match=f"^zeroamp.symmetric_memory is true, but {reason}"):
        symmetric_memory.symmetric_gather(policy(config(3, **cfg), fields), _CudaMesh(), nodes)


def _wrap_on_gloo():
    with pytest.raises(zeroamp.ConfigError, match="symmetric_memory is true, but it needs NCCL on CUDA.* on cpu"):
        train("llama_tied", config(3, **SHARED), 1)
    symmetric_memory.has_symmetric_all_gather = lambda: False
    try:
        with pytest.raises(zeroamp.ConfigError, match="but FSDP2 of torch .* has no all-gather in symmetric.* 2.13"):
            train("llama_tied", config(3, **SHARED), 1)
    finally:
        symmetric_memory.has_symmetric_all_gather = of_torch.has_symmetric_all_gather


@needs_class
def test_another_backend_and_an_older_torch_are_refused(ranks2):
    ranks2.run(_wrap_on_gloo)


def _fails(group):
    raise RuntimeError("no peer access")


@needs_class
def test_a_device_that_cannot_share_memory_is_refused(monkeypatch):
    monkeypatch.setattr(symmetric_memory, "_why_not", lambda *_: "")
    monkeypatch.setattr(symmetric_memory, "shard_size", lambda _mesh: 2)
    monkeypatch.setattr(symmetric_memory, "device_of", lambda _mesh: torch.device("cpu"))
    monkeypatch.setattr(_fsdp_collectives, "SymmMemAllGather", _fails)
    with pytest.raises(zeroamp.ConfigError, match="all-gather in symmetric memory failed: no peer access.* Remove"):
        symmetric_memory.symmetric_gather(policy(config(3, **SHARED)), _CudaMesh(), MeshNodes())


def test_without_the_key_nothing_is_asked(caplog):
    with caplog.at_level(logging.INFO, logger="zeroamp"):
        assert symmetric_memory.symmetric_gather(policy(config(3)), None, None) is None
    assert caplog.records == []
