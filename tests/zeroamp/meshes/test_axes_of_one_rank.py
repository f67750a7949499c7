"""No collective runs over a mesh axis of one rank: on an accelerator it would make a communicator, with its memory."""

import pytest
import torch.distributed as dist

import zeroamp
from tests.models.small import batch
from tests.processes.training import config, wrapped

COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "all_gather_object", "send", "recv")


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
        cfg = config(stage, train_micro_batch_size_per_gpu=1)
        wrapped("llama_tied", cfg, mesh_shape=mesh_shape, fields={"sync_module_states": True})
        model = wrapped("llama_tied", cfg, mesh_shape=mesh_shape)  # compares checksums
        zeroamp.export_hf(model, folder)
        if mesh_shape is None:  # FSDP2 runs its own all-reduce over replicas in a backward, of one rank too
            zeroamp.explain(model).verify(model, batch("llama_tied", 0))
    return sizes


@pytest.mark.parametrize(("stage", "mesh_shape"), [(0, None), (3, (1, 2))])
def test_wraps_exports_and_verify_use_no_group_of_one_rank(ranks2, tmp_path, stage, mesh_shape):
    for sizes in ranks2.run(_groups_in_use, str(tmp_path / "export"), stage, mesh_shape):
        assert sizes["broadcast"] == {2}
        assert set.union(*sizes.values()) == {2}
