"""Finds the ranks of a mesh axis that share a node, and makes the process groups of collectives in two levels.

Loaded only if the ranks span several nodes, as far as `zeroamp.ranks_per_node`, the launcher or the number of
accelerators shows. Without a number from the first two, the nodes are found by their hosts' names.
"""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks._torch.process_groups import group_of_parts
from zeroamp.planning.mesh import device_of, parts_of_axis
from zeroamp.policies.errors import some_of
from zeroamp.policies.policy import Policy
from zeroamp.two_level.nodes import Nodes
from zeroamp.wrapping.model_checks import ranks_per_node
from zeroamp.wrapping.run_alike import is_equal
from zeroamp.wrapping.state import MeshNodes

logger = logging.getLogger("zeroamp")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisNodes:
    """How the ranks of one axis are placed on nodes."""

    num_nodes: int
    num_inside: int | None
    """Ranks of the axis on each node. None unless they are neighbours in the axis, and a power of two above 1."""

    @property
    def is_two_level(self) -> bool:
        """Whether a reduction in two levels is possible and differs from one in one level."""
        return self.num_nodes > 1 and self.num_inside is not None

    @property
    def is_uneven(self) -> bool:
        """Whether nodes have several ranks of the axis, but in an order in which two levels would change the bits."""
        return self.num_nodes > 1 and self.num_inside is None


def nodes_of_axis(ranks: Sequence[int], per_node: int) -> AxisNodes:
    """Return how an axis is placed on nodes of `per_node` consecutive ranks.

    `ranks` are the axis's global ranks, in the order of the axis. With one rank on each node there is nothing to sum in
    a node: `num_nodes` is then 1.
    """
    runs = [(node, len(list(run))) for node, run in groupby(rank // per_node for rank in ranks)]
    nodes, sizes = {node for node, _ in runs}, {size for _, size in runs}
    if sizes == {1} and len(nodes) == len(runs):
        return AxisNodes(num_nodes=1, num_inside=None)  # nothing to sum inside a node
    (size, *others) = sizes
    is_even = not others and len(nodes) == len(runs) and size & (size - 1) == 0
    return AxisNodes(num_nodes=len(nodes), num_inside=size if is_even else None)


def nodes_of_mesh(policy: Policy, mesh: DeviceMesh, world: dist.ProcessGroup | None) -> MeshNodes:
    """Return the two levels of the axes of a mesh that spans nodes. All ranks of the mesh call this.

    The ranks compare their `ranks_per_node` in one small all-reduce. An axis with two levels gets two process groups.
    The first rank warns of an axis that spans nodes and has one level.
    """
    nodes = _nodes_of_mesh(policy, mesh, world)
    if nodes.why_flat is not None and dist.get_rank(world) == 0:
        logger.warning(
            "Gradients are sent between nodes by all-to-alls in one level, because %s. With g ranks per node, these "
            "send up to g times the bytes of a ring through each network card. More replicas "
            '(zeroamp.dp_replicate_size, or a mesh) avoid this. With "ranks_per_node": "off" nothing is logged.',
            nodes.why_flat,
        )
    return nodes


def _nodes_of_mesh(policy: Policy, mesh: DeviceMesh, world: dist.ProcessGroup | None) -> MeshNodes:
    per_node = ranks_per_node(policy)
    if per_node is None:
        blocks = _ranks_by_host(world)
        if blocks is None:
            return MeshNodes(why_flat="the ranks of a node are not consecutive ranks of the job")
        if len(blocks) <= 1:
            return MeshNodes()
        if len(set(blocks)) > 1:
            return MeshNodes(why_flat="nodes have different numbers of ranks")
        per_node = blocks[0]
    if not is_equal(per_node, "zeroamp.ranks_per_node", world, device_of(mesh)):
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
    by_axis = {axis: _made(axis, layout, mesh, policy) for axis, layout in found.items()}
    return MeshNodes(by_axis=by_axis, why_flat=why_flat)


def _ranks_by_host(world: dist.ProcessGroup | None) -> list[int] | None:
    """Return the numbers of consecutive ranks on each host, by the hosts' names. All ranks of `world` call this.

    Empty if the mesh has only some of the job's ranks: their numbers do not show where the others are. None if the
    ranks of a host are not consecutive.
    """
    if dist.get_world_size(world) < dist.get_world_size():
        return []
    hosts = [""] * dist.get_world_size(world)
    dist.all_gather_object(hosts, socket.gethostname(), group=world)
    blocks = [len(list(block)) for _, block in groupby(hosts)]
    return blocks if len(blocks) == len(set(hosts)) else None


def _made(axis: int, layout: AxisNodes, mesh: DeviceMesh, policy: Policy) -> Nodes:
    num_inside = layout.num_inside or 1
    nodes = torch.tensor(parts_of_axis(mesh, axis), device="cpu").view(-1, layout.num_nodes, num_inside)
    timeout = timeout_of(mesh.get_group(mesh.ndim - 1), mesh.device_type)
    inside = group_of_parts(nodes.flatten(0, 1).tolist(), timeout, use="two levels")
    across = group_of_parts(nodes.transpose(1, 2).flatten(0, 1).tolist(), timeout, use="two levels")
    return Nodes(inside=inside, across=across, partials=policy.partials_between_nodes)
