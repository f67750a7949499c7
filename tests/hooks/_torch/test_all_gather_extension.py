"""FSDP2 calls the two methods of another object than the shard, and reads nothing else from it."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.tensor import DTensor, Shard

from zeroamp.hooks._torch.all_gather_extension import largest_magnitudes, shards_of


class InBytes:
    """Sends one byte per element: its whole part."""

    def __init__(self, shard):
        self.shard, self.calls = shard, []

    def fsdp_pre_all_gather(self, mesh):
        self.calls.append(("pre", type(mesh).__name__, tuple(self.shard.padded.shape)))
        return (self.shard.padded.to(torch.uint8),), "metadata"

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (whole,) = all_gather_outputs
        self.calls.append(("post", metadata, param_dtype, out is not None))
        if out is not None:
            out.detach().copy_(whole.view(-1)[: out.numel()].view(out.shape))
            return None
        unsharded = whole.to(param_dtype)
        return unsharded, (unsharded,)


def _unshard(shape, dim):
    torch.manual_seed(0)
    module = nn.Module()
    whole = torch.randint(0, 200, shape).float() + 0.25
    module.weight, module.bias = nn.Parameter(whole.clone()), nn.Parameter(torch.ones(3))
    fully_shard(
        module, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(dim if p.ndim > 1 else 0)
    )
    (shard,) = shards_of(module, ["weight"])
    extension = InBytes(shard)
    shard.extend(extension)
    seen = []
    for _ in range(2):
        module.unshard()
        seen.append(torch.equal(module.weight.detach(), whole.floor()) and torch.equal(module.bias, torch.ones(3)))
        module.reshard()
    assert isinstance(module.weight, DTensor)
    return seen, type(module.weight.to_local()), torch.equal(module.weight.full_tensor(), whole), extension.calls


@pytest.mark.parametrize(("shape", "dim", "padded"), [((4, 6), 0, (2, 6)), ((5, 2), 0, (3, 2)), ((1, 2), 0, (1, 2))])
def test_the_shard_stays_plain_and_the_extension_makes_the_unsharded_parameter(ranks2, shape, dim, padded):
    for seen, kind, is_unchanged, calls in ranks2.run(_unshard, shape, dim):
        assert seen == [True, True]
        assert kind is torch.Tensor
        assert is_unchanged
        pre = ("pre", "DeviceMesh", padded)
        assert calls == [
            pre,
            ("post", "metadata", torch.float32, False),
            pre,
            ("post", "metadata", torch.float32, True),
        ]


def test_fsdp2_reads_the_property_for_its_extensions_alone():
    """Else another object in its place would change something else."""
    for module in (_fsdp_param, _fsdp_collectives):
        lines = inspect.getsource(module).splitlines()
        for index, line in enumerate(lines):
            if "_sharded_local_tensor" in line and "def _sharded_local_tensor" not in line:
                around = "".join(lines[max(0, index - 1) : index + 12])
                assert "_all_gather" in around, f"{module.__name__}: {line}"


def test_largest_magnitudes():
    tensors = [torch.tensor([[1.0, -3.0]]), torch.zeros(2), torch.tensor([float("nan"), 1.0])]
    assert torch.equal(largest_magnitudes(tensors).nan_to_num(-1.0), torch.tensor([3.0, 0.0, -1.0]))
