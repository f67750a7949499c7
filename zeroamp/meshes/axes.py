"""Finds the axes of the caller's mesh by their names, the mesh that it is a slice of, and the model's DTensors."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dtensor import flattened, joined, root_of
from zeroamp.planning.mesh_axes import ROLES, MeshAxes, is_expert, plain_axes
from zeroamp.policies.errors import WrapError

_OF_MODEL = ("context", "tensor", "expert")


def find_axes(model: nn.Module, mesh: DeviceMesh | None) -> MeshAxes | None:
    """Return the axes of a mesh, for a model that is plain or parallelized. See `zeroamp.planning.mesh_axes`."""
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
    mesh, stages = _without_stages(mesh)
    return replace(_with_model_axis(_with_root(_given(mesh), mesh), split), stages=stages)


def _without_stages(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh without its pipeline axis, and the pipeline axis of the mesh that it is a slice of.

    Slices of an unflattened mesh, such as torchtitan's, do not lead to the pipeline axis. Such a mesh may contain it.
    """
    names = mesh.mesh_dim_names or ()
    others = tuple(name for name in names if ROLES.get(name) != "pipeline")
    stages = _pipeline_axis(root_of(mesh))
    if len(others) < len(names) and stages is not None:
        raise WrapError(
            f"The mesh has an axis {_axis_name(stages)!r} of {stages.size()} ranks, which run different parts of the "
            "model. Wrap each part over the ranks that have the same one: pass the mesh without this axis, "
            f"mesh=mesh[{', '.join(map(repr, others))}]. See docs/pipelines.md."
        )
    return mesh[others] if 0 < len(others) < len(names) else mesh, stages or _pipeline_axis(mesh)


def _pipeline_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    return next((axis for axis in _named_axes(mesh) if ROLES[_axis_name(axis)] == "pipeline"), None)


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


def _axis_name(mesh: DeviceMesh) -> str:
    """Return the name of the axis of a 1-D mesh; "" for a mesh without names or with several axes."""
    names = mesh.mesh_dim_names or ()
    return names[0] if len(names) == 1 else ""


def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _described(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    if names is None:
        return f"a mesh of shape {tuple(sizes)}"
    parts = [f"{name} {size}" for name, size in zip(names, sizes, strict=True)]
    return f"the mesh {' x '.join(parts)}"
