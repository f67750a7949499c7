"""The private names of DeviceMesh: the mesh that a slice was taken from, and meshes joined from slices of it.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; `tests/hooks/_torch/test_private_names.py` fails when one is gone.
"""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `mesh` was sliced or flattened from; `mesh` itself if it was made directly."""
    return mesh._get_root_mesh()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of one axis with all ranks of a named mesh. The first call makes a process group, on all ranks."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the axes of `meshes`, slices of one mesh, in this order. Makes no process group."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))
