"""The axes of data, context, tensor, expert and pipeline parallelism of the caller's mesh.

[Note: Who averages what]
Ranks of a data axis (data-parallel ranks, in short data ranks) get different samples, and ranks of a context axis
different parts of the same samples. The model computes a different loss on each of them, so FSDP2 shards parameters
over all of them, and gradients are averaged over all of them. Only the ranks of the data axes count for batch sizes.
Ranks of a tensor axis compute the same loss together. Each has a part of some parameters (DTensors of that axis) and
all of the others. FSDP2 shards both kinds over the data and context axes only. Ranks of an expert axis get different
samples, so they are data ranks. Each has a part of the experts, which FSDP2 shards over the other data ranks. All other
parameters are sharded over all data ranks. Ranks of a pipeline axis have different parts of the model. Each part is a
model of its own here, over the other axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import Ranks, ranks_of

ROLES: Mapping[str, Literal["replicate", "shard", "context", "tensor", "expert", "pipeline"]] = {
    "replicate": "replicate",
    "dp_replicate": "replicate",
    "shard": "shard",
    "dp_shard": "shard",
    "dp": "shard",
    "fsdp": "shard",
    "batch": "shard",
    "cp": "context",
    "sp": "context",
    "tp": "tensor",
    "ep": "expert",
    "pp": "pipeline",
}
"""Name of an axis -> its role. A 1-D or 2-D mesh may have other names, if all its axes are for data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshAxes:
    """The meshes and numbers of ranks of each kind of parallelism. See [Note: Who averages what]."""

    fsdp: DeviceMesh
    """The ranks that FSDP2 shards over: 1-D (shard) or 2-D (replicate, shard). Gradients are averaged over them."""
    whole: DeviceMesh
    """All ranks that train the model: the axes of `fsdp`, and the tensor axis if there is one."""
    tensor: DeviceMesh | None = None
    """The axis of tensor parallelism, 1-D. None without tensor parallelism."""
    experts: DeviceMesh | None = None
    """The ranks over which FSDP2 shards the experts, 1-D. None without expert parallelism."""
    stages: DeviceMesh | None = None
    """The axis of pipeline parallelism, 1-D, which a part has not in `whole`: each of its ranks has other parts.
    None without pipeline parallelism."""
    is_joined: bool = False
    """Whether `whole` has the ranks of all stages, because the model is all parts of this rank: see `PipelineStep`."""
    num_context: int = 1
    """The number of ranks that get parts of the same samples."""

    @property
    def num_data(self) -> int:
        """The number of ranks that get different samples. Batch sizes are multiplied by it."""
        return self.fsdp.size() // self.num_context

    @property
    def num_tensor(self) -> int:
        """The number of ranks that compute one loss together."""
        return self.whole.size() // self.fsdp.size()

    @property
    def is_data_only(self) -> bool:
        """Whether all ranks get different samples and have the same parameters before FSDP2 shards them."""
        return self.is_plain and self.num_context == 1

    @property
    def is_plain(self) -> bool:
        """Whether parameters are sharded by FSDP2 alone: there is neither a tensor nor an expert axis."""
        return self.tensor is None and self.experts is None

    def fsdp_of(self, *, is_expert: bool) -> DeviceMesh:
        """Return the mesh that FSDP2 gets for a parameter that is, or is not, an expert."""
        return self.experts if is_expert and self.experts is not None else self.fsdp

    def with_fsdp(self, mesh: DeviceMesh) -> "MeshAxes":
        """Return a copy whose `fsdp` is `mesh`, the mesh that FSDP2 gets at the policy's stage."""
        return replace(self, fsdp=mesh, whole=mesh if self.whole is self.fsdp else self.whole)

    def describe(self) -> str:
        """Return the numbers of ranks as text: "dp 2 x cp 2 x tp 2"; empty if all ranks get different samples."""
        sizes = {"dp": self.num_data, "cp": self.num_context, "tp": self.num_tensor}
        if self.experts is not None:
            sizes |= {"dp": self.experts.size(), "ep": self.fsdp.size() // self.experts.size()}
        if self.is_data_only:
            return ""
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def ranks_of_axes(axes: MeshAxes) -> Ranks:
    """Return the numbers of ranks of these axes, for plans of traffic and memory."""
    num_expert = 1 if axes.experts is None else axes.fsdp.size() // axes.experts.size()
    return replace(ranks_of(axes.fsdp), num_tensor=axes.num_tensor, num_expert=num_expert)


def plain_axes(mesh: DeviceMesh) -> MeshAxes:
    """Return the axes of a mesh that has all ranks of the model, each of which gets different samples."""
    return MeshAxes(fsdp=mesh, whole=mesh)


def is_expert(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is distributed over an axis of expert parallelism, before FSDP2 shards it."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return names is not None and len(names) == 1 and ROLES.get(names[0]) == "expert"


def find_axes(model: nn.Module, mesh: DeviceMesh | None) -> MeshAxes | None:
    """Return the axes of the caller's mesh, and of the mesh that it is a slice of.

    The caller may pass a data mesh, a slice of a mesh with names (`mesh["dp"]`, or a flattened (dp, cp)), or the whole
    named mesh. For a slice, the other axes of the whole mesh are found. The tensor axis is also found from the model's
    DTensors.

    Args:
        model: plain, or after `parallelize_module`. Not changed.
        mesh: the caller's. None: all ranks are for data.

    Returns:
        The axes; None if `mesh` is None.

    Raises:
        WrapError: an axis has an unknown name, an axis is missing, or its parallelism is not supported.
    """
    if mesh is None and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    from zeroamp.meshes.axes import find_axes as find_named_axes  # no other mesh needs it

    return find_named_axes(model, mesh)
