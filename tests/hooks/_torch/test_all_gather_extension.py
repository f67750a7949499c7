"""FSDP2 reads another object in place of the shard for its two methods, and nothing else from it."""

import inspect

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

from zeroamp.hooks._torch.all_gather_extension import largest_magnitudes


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
