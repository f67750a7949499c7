"""No collective runs over a mesh axis of one rank: on an accelerator it would make a communicator, with its memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.small import batch
from tests.processes.training import config, wrapped

COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "all_gather_object", "send", "recv")


class _WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(2, device="cpu"))

    def forward(self, x):
        return self.linear(x) * self.seen.sum()


def _groups_in_use(folder, stage, mesh_shape):
    """The sizes of the groups of the collectives of wraps, of an export and of `verify`."""
    sizes = {name: set() for name in COLLECTIVES}
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            real = getattr(dist, name)

            def call(*args, _real=real, _name=name, **kwargs):
                sizes[_name].add(dist.get_world_size(kwargs.get("group")))
                return _real(*args, **kwargs)

            patch.setattr(dist, name, call)
        wrapped("llama_tied", config(stage), mesh_shape=mesh_shape, fields={"sync_module_states": True})
        with torch.device("meta"):
            model = _WithBuffer()
        cfg = config(stage) | {"train_micro_batch_size_per_gpu": 1}
        wrapped_mesh = None if mesh_shape is None else _mesh(mesh_shape)
        model = zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg), mesh=wrapped_mesh)
        zeroamp.export_hf(model, folder)
        model = wrapped("llama_tied", config(stage), mesh_shape=mesh_shape)  # compares checksums
        if mesh_shape is None:  # FSDP2 runs its own all-reduce over replicas in a backward, of one rank too
            zeroamp.explain(model).verify(model, batch("llama_tied", 0))
    return sizes


def _mesh(shape):
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize(("stage", "mesh_shape"), [(0, None), (3, (1, 2))])
def test_wraps_exports_and_verify_use_no_group_of_one_rank(ranks2, tmp_path, stage, mesh_shape):
    for sizes in ranks2.run(_groups_in_use, str(tmp_path / "export"), stage, mesh_shape):
        assert sizes["broadcast"] == {2}
        assert set.union(*sizes.values()) == {2}
