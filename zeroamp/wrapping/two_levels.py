"""Makes the process groups of reductions and all-gathers in two levels, once per wrapped model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks._torch.process_groups import group_of_parts
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.nodes import Nodes
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.planning.mesh import device_of, parts_of_axis
from zeroamp.planning.node_layout import AxisNodes, is_one_node, nodes_of_axis, ranks_per_node
from zeroamp.policies.errors import some_of
from zeroamp.policies.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshNodes:
    """The two levels of the axes of a mesh. By default all axes have one level."""

    reductions: Mapping[int, Nodes] = field(default_factory=dict)
    """Axis -> its two levels for reductions. At most one axis has two levels."""
    gathers: Mapping[int, Nodes] = field(default_factory=dict)
    """Axis -> its two levels for all-gathers. Other process groups if `zeroamp.separate_reduce_scatter_group` is on."""
    why_flat: str | None = None
    """Why an axis that spans nodes has one level. None if there is no such axis."""


def nodes_of_mesh(policy: Policy, mesh: DeviceMesh, world: dist.ProcessGroup | None) -> MeshNodes:
    """Return the two levels of the mesh's axes. All ranks of the mesh call this.

    If all ranks share a node, if the number of ranks per node is not known, or with native sums, all axes have one
    level and nothing is communicated. Otherwise the ranks compare their `ranks_per_node` in one small all-reduce. An
    axis with two levels gets two process groups.
    """
    per_node = ranks_per_node(policy)
    # Of the world, not of the mesh: on nodes of different sizes, all ranks must decide alike.
    if per_node is None or is_one_node(policy, dist.get_world_size()) or policy.reduce_accumulate_dtype != "fp32":
        return MeshNodes()
    if not _is_equal(per_node, mesh, world):
        return MeshNodes(why_flat="nodes have different numbers of ranks")
    found: dict[int, AxisNodes] = {}
    why_flat = None
    for axis in range(mesh.ndim):
        # All parts are checked, because all ranks must decide alike.
        layouts = [nodes_of_axis(part, per_node) for part in parts_of_axis(mesh, axis)]
        if all(layout.is_two_level for layout in layouts):
            found[axis] = layouts[0]
        elif any(layout.is_uneven or layout.is_two_level for layout in layouts):
            ranks = some_of([str(rank) for rank in dist.get_process_group_ranks(mesh.get_group(axis))])
            why_flat = f"the ranks {ranks} do not lie on nodes of {per_node} as equal blocks of a power of two"
    reductions = {axis: _made(axis, layout, mesh, policy) for axis, layout in found.items()}
    gathers = reductions
    if policy.separate_reduce_scatter_group and mesh.ndim - 1 in found:
        gathers = {axis: _made(axis, layout, mesh, policy) for axis, layout in found.items()}
    return MeshNodes(reductions=reductions, gathers=gathers, why_flat=why_flat)


def _is_equal(per_node: int, mesh: DeviceMesh, world: dist.ProcessGroup | None) -> bool:
    bounds = torch.tensor([per_node, -per_node], dtype=torch.int64, device=device_of(mesh))
    issued = IssuedCollective("all_reduce", bounds, "zeroamp.ranks_per_node", world, dist.ReduceOp.MAX)
    issue(lambda: dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=world), issued, ())
    return int(bounds[0]) == -int(bounds[1])


def _made(axis: int, layout: AxisNodes, mesh: DeviceMesh, policy: Policy) -> Nodes:
    num_inside = layout.num_inside or 1
    nodes = torch.tensor(parts_of_axis(mesh, axis)).view(-1, layout.num_nodes, num_inside)
    timeout = timeout_of(mesh.get_group(mesh.ndim - 1), mesh.device_type)
    inside = group_of_parts(nodes.flatten(0, 1).tolist(), timeout)
    across = group_of_parts(nodes.transpose(1, 2).flatten(0, 1).tolist(), timeout)
    return Nodes(inside=inside, across=across, partials=policy.partials_between_nodes)
