"""Slices of a mesh: the mesh that they are of, flattened and joined ones, as this torch makes them."""

from torch.distributed.device_mesh import init_device_mesh

from zeroamp.hooks._torch.mesh_slices import flattened, joined, root_of


def _slices():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = flattened(mesh["dp", "cp"])
    whole = joined([flat, mesh["tp"]])
    is_root = [root_of(each) is mesh for each in (mesh, mesh["dp"], flat, whole)]
    groups = [len(each.get_all_groups()) for each in (flat, whole)]
    return is_root, flat.mesh.tolist(), whole.mesh_dim_names, whole.mesh.tolist(), groups


def test_slices_know_their_root_and_can_be_joined(ranks4):
    for rank, (is_root, flat, names, whole, groups) in enumerate(ranks4.run(_slices)):
        assert all(is_root)
        assert flat == [rank % 2, rank % 2 + 2]
        assert (names, whole) == (("dp_cp", "tp"), [[0, 1], [2, 3]])
        assert groups == [1, 2]
