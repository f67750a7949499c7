"""Finds the axes of data, context, tensor and expert parallelism in the caller's mesh.

[Note: Who averages what]
Ranks of a data axis (data-parallel ranks, in short data ranks) get different samples, and ranks of a context axis
different parts of the same samples. The model computes a different loss on each of them, so FSDP2 shards parameters
over all of them, and gradients are averaged over all of them. Only the ranks of the data axes count for batch sizes.
Ranks of a tensor axis compute the same loss together. Each has a part of some parameters (DTensors of that axis) and
all of the others. FSDP2 shards both kinds over the data and context axes only. Ranks of an expert axis get different
samples, so they are data ranks. Each has a part of the experts, which FSDP2 shards over the other data ranks. All other
parameters are sharded over all data ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.mesh_slices import flattened, joined, root_of
from zeroamp.planning.mesh import Ranks, ranks_of
from zeroamp.policies.errors import WrapError

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

_OF_MODEL = ("context", "tensor", "expert", "pipeline")


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
        if self.is_plain and self.num_context == 1:
            return ""
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def ranks_of_axes(axes: MeshAxes) -> Ranks:
    """Return the numbers of ranks of these axes, for plans of traffic and memory."""
    num_expert = 1 if axes.experts is None else axes.fsdp.size() // axes.experts.size()
    return replace(ranks_of(axes.fsdp), num_tensor=axes.num_tensor, num_expert=num_expert)


def plain_axes(mesh: DeviceMesh) -> MeshAxes:
    """Return the axes of a mesh that has all ranks of the model, each of which gets different samples."""
    return MeshAxes(fsdp=mesh, whole=mesh)


def axis_of(parameter: torch.Tensor) -> str | None:
    """Return the name of the mesh axis over which a parameter is distributed before FSDP2 shards it.

    None for a plain tensor, and for a DTensor of a mesh of several axes or without names.
    """
    if not isinstance(parameter, DTensor):
        return None
    return _axis_name(parameter.device_mesh) or None


def _axis_name(mesh: DeviceMesh) -> str:
    """Return the name of the axis of a 1-D mesh; "" for a mesh without names or with several axes."""
    names = mesh.mesh_dim_names or ()
    return names[0] if len(names) == 1 else ""


def is_expert(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is distributed over an axis of expert parallelism."""
    return ROLES.get(axis_of(parameter) or "") == "expert"


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
    if any(isinstance(module, FSDPModule) for module in model.modules()):  # refused elsewhere
        return None if mesh is None else plain_axes(mesh)
    split = {fqn: parameter for fqn, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    if mesh is None:
        if split:
            fqn, parameter = next(iter(split.items()))
            raise WrapError(
                f"{fqn} is a DTensor of {_described(parameter.device_mesh)}, but wrap_model got no mesh, and would "
                "shard over all ranks. Pass the mesh that the model was parallelized with: wrap_model(model, policy, "
                'mesh=mesh), or its data axis, mesh=mesh["dp"].'
            )
        return None
    for axis in _named_axes(root_of(mesh)):
        name = _axis_name(axis)
        if ROLES[name] == "pipeline":
            raise WrapError(
                f"The mesh has an axis {name!r} of {axis.size()} ranks: pipeline parallelism, which is not supported. "
                "Use data, context, tensor or expert parallelism instead."
            )
    return _with_model_axis(_with_root(_given(mesh), mesh), split)


def _given(mesh: DeviceMesh) -> MeshAxes:
    """Return the axes of the caller's mesh itself."""
    names = mesh.mesh_dim_names or ()
    roles = [ROLES.get(name) for name in names]
    if not any(role in _OF_MODEL for role in roles):
        return plain_axes(mesh)
    if None in roles or "shard" not in roles or len(set(roles)) < len(roles):
        raise WrapError(
            f"The mesh has the axes {', '.join(names)}. Beside a context, tensor or expert axis, each axis must have a "
            f"name of {', '.join(ROLES)}, no two may have the same use, and FSDP2 must shard over one: dp, dp_shard or "
            "fsdp. Rename them, or slice the axes of this model out of the mesh."
        )
    axis_of_role = {role: mesh[name] for role, name in zip(roles, names, strict=True)}
    flat = flattened(mesh[tuple(name for name in names if ROLES[name] in ("shard", "context", "expert"))])
    fsdp = flat if "replicate" not in roles else joined([axis_of_role["replicate"], flat])
    axes = plain_axes(fsdp)
    if (context := axis_of_role.get("context")) is not None:
        axes = replace(axes, num_context=context.size())
    if (tensor := axis_of_role.get("tensor")) is not None and tensor.size() > 1:
        axes = replace(axes, tensor=tensor)
    if (experts := axis_of_role.get("expert")) is not None and experts.size() > 1:
        # The experts' own data ranks; a context axis beside it is refused elsewhere.
        axes = replace(axes, experts=axis_of_role["shard"])
    return axes


def _with_root(axes: MeshAxes, mesh: DeviceMesh) -> MeshAxes:
    """Add the context axis of the mesh that the caller's mesh is a slice of; raise if axes are missing.

    A tensor axis over which no parameter is distributed is left out: each of its ranks trains a model of its own.
    """
    if (root := root_of(mesh)) is mesh:
        return axes
    for axis in _named_axes(root):
        name = _axis_name(axis)
        role, is_inside = ROLES[name], _ranks(axis) <= _ranks(mesh)
        if role == "context" and is_inside:
            axes = replace(axes, num_context=axis.size())
        elif role == "context" or (role == "expert" and not (is_inside and axes.experts is not None)):
            raise WrapError(
                f"The mesh given ({_described(mesh)}) is a slice of one with the axis {name!r} of {axis.size()} ranks, "
                "which is not in it. Gradients must be averaged over these ranks too. Pass both: "
                f'mesh=mesh["dp", "{name}"].'
            )
    return axes


def _with_model_axis(axes: MeshAxes, split: Mapping[str, DTensor]) -> MeshAxes:
    """Add the tensor axis of the model's DTensors, check that it fits the other axes, and join all ranks."""
    for fqn, parameter in split.items():
        own = parameter.device_mesh
        if is_expert(parameter) and axes.experts is not None:
            continue
        if axes.tensor is None:
            axes = replace(axes, tensor=own)
        if own.ndim > 1 or is_expert(parameter) or _ranks(axes.tensor or own) != _ranks(own):
            raise WrapError(
                f"{fqn} is a DTensor of {_described(own)}. Before FSDP2 shards a parameter, it may be distributed over "
                "one axis of the mesh given: the tensor axis, the same for all parameters, or the expert axis. Pass "
                'the mesh with that axis: wrap_model(model, policy, mesh=mesh["dp", "ep"]).'
            )
    if axes.tensor is None:
        return axes
    overlaps = len(_ranks(axes.tensor) & _ranks(axes.fsdp)) != 1
    if overlaps or root_of(axes.tensor) is not root_of(axes.fsdp):
        raise WrapError(
            f"The mesh given ({_described(axes.fsdp)}) and {_described(axes.tensor)}, over which the model is "
            "tensor-parallel, must be slices of one mesh without a rank in common but this one. Make one with "
            'init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")), parallelize the model over mesh["tp"], '
            'and pass the data axis of the same mesh, mesh=mesh["dp"].'
        )
    return replace(axes, whole=joined([axes.fsdp, axes.tensor]))


def _named_axes(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield the axes that have several ranks and a name of `ROLES`."""
    for name in mesh.mesh_dim_names or ():
        if name in ROLES and mesh[name].size() > 1:
            yield mesh[name]


def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _described(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    if names is None:
        return f"a mesh of shape {tuple(sizes)}"
    parts = [f"{name} {size}" for name, size in zip(names, sizes, strict=True)]
    return f"the mesh {' x '.join(parts)}"
