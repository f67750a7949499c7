"""The process groups of the mesh of stage 0."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from zeroamp.planning.mesh import mesh_for_stage


def _groups_of_stage_0():
    """Return the ranks of each group that the mesh makes, what `device_id` is meanwhile and after, and the shape."""
    default, made = dist.group.WORLD, []
    default.bound_device_id = torch.device("cpu", 0)
    new_group = dist.new_group

    def noting(ranks, *args, **kwargs):
        made.append((ranks, default.bound_device_id))
        return new_group(ranks, *args, **kwargs)

    with mock.patch.object(dist, "new_group", noting), mock.patch.object(device_mesh, "new_group", noting):
        mesh = mesh_for_stage(0, None)
    replicas = dist.get_process_group_ranks(mesh.get_group("replicate"))
    return made, default.bound_device_id, tuple(mesh.mesh.shape), mesh["shard"].size(), replicas


def test_each_rank_makes_the_group_of_its_own_shard_only(ranks4):
    # With the `device_id`, NCCL would make a communicator for it at once, in a collective of all ranks of the job.
    expected = [([([rank], None)], torch.device("cpu", 0), (4, 1), 1, [0, 1, 2, 3]) for rank in range(4)]
    assert ranks4.run(_groups_of_stage_0) == expected
