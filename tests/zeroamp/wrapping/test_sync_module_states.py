"""`zeroamp.sync_module_states`: every rank gets the first rank's parameters and buffers, at any stage and mesh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.measuring.storage_peak import StoragePeak
from tests.processes.training import config, full_parameters, mesh_of, policy

SYNC = {"zeroamp": {"sync_module_states": True}}


class Small(nn.Module):
    """Tied, frozen and low-precision parameters; buffers of many kinds, in and out of the state_dict."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.up = nn.Linear(6, 10)
        self.frozen = nn.Parameter(torch.randn(4, dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(6)[::2])
        self.register_buffer("count", torch.randint(0, 100, ()))
        self.register_buffer("mask", torch.rand(5) > 0.5, persistent=False)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("none", torch.empty(0))


def _synced(cfg, mesh_shape):
    """Return the first rank's values before the wrap, and those of this rank after it."""
    torch.manual_seed(0)
    expected = Small()
    torch.manual_seed(dist.get_rank())
    model = zeroamp.wrap_model(Small(), policy(cfg), mesh_of(mesh_shape))
    assert model.head.weight is model.embed.weight
    found = full_parameters(model) | dict(model.named_buffers())
    wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(wanted[name], found[name].to(wanted[name].dtype))]


@pytest.mark.parametrize(("stage", "mesh_shape"), [(0, None), (3, (2, 2))], ids=["stage 0", "replicas"])
def test_all_ranks_get_the_first_ranks_values(ranks4, stage, mesh_shape):
    assert ranks4.run(_synced, config(stage, **SYNC), mesh_shape) == [[]] * 4


def _peak_of_the_broadcast():
    from zeroamp.planning.mesh_axes import plain_axes
    from zeroamp.wrapping.model_checks import broadcast_module_states

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with StoragePeak(limit=64 * 64) as peak:
        broadcast_module_states(model, plain_axes(mesh))
    return peak.num_bytes


def test_there_is_no_second_copy(ranks2):
    assert ranks2.run(_peak_of_the_broadcast) == [0, 0]
