"""Makes the process groups of reductions and gathers in two levels, once per wrapped model."""

import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import all_gather, timeout_of
from zeroamp.hooks.collectives.issued import issue
from zeroamp.hooks.collectives.nodes import Nodes
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.planning.mesh import device_of, is_first_rank
from zeroamp.planning.nodes import AxisNodes, nodes_of_axis, ranks_per_node
from zeroamp.policies.policy import Policy

logger = logging.getLogger("zeroamp")


def nodes_of_mesh(policy: Policy, mesh: DeviceMesh, world: dist.ProcessGroup | None) -> dict[int, Nodes]:
    """Return the two levels of each mesh axis that has them; at most one axis has. All ranks of the mesh call this.

    Where all ranks share a node, where the launcher does not say how many a node has, and with the backend's own sums,
    nothing is communicated and nothing is made. Else the ranks compare their numbers in one small all-reduce, and two
    process groups are made and used once: a backend connects ranks at their first collective, and NCCL takes memory.

    Logs a WARNING on the first rank where an axis spans nodes but is reduced flat.
    """
    per_node = ranks_per_node(policy)
    if per_node is None or per_node >= mesh.size() or policy.reduce_accumulate_dtype != "fp32":
        return {}
    if not _is_equal(per_node, mesh, world):
        _warn(mesh, "nodes have different numbers of ranks")
        return {}
    found: dict[int, Nodes] = {}
    for axis in range(mesh.ndim):
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        # All ranks must decide alike, also those whose own part of the axis is even.
        layouts = [nodes_of_axis(part, per_node) for part in _parts(mesh, axis)]
        if all(layout.is_two_level for layout in layouts):
            found[axis] = _made(ranks, layouts[0], mesh, policy)
        elif any(layout.is_uneven or layout.is_two_level for layout in layouts):
            _warn(mesh, f"the ranks {ranks} do not lie on nodes of {per_node} as equal blocks of a power of two")
    return found


def _parts(mesh: DeviceMesh, axis: int) -> list[list[int]]:
    parts: list[list[int]] = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    return parts


def _is_equal(per_node: int, mesh: DeviceMesh, world: dist.ProcessGroup | None) -> bool:
    bounds = torch.tensor([per_node, -per_node], dtype=torch.int64, device=device_of(mesh))
    issued = IssuedCollective("all_reduce", bounds, "zeroamp.ranks_per_node", world, dist.ReduceOp.MAX)
    issue(lambda: dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=world), issued, ())
    return int(bounds[0]) == -int(bounds[1])


def _made(ranks: list[int], layout: AxisNodes, mesh: DeviceMesh, policy: Policy) -> Nodes:
    place, num_inside = ranks.index(dist.get_rank()), layout.num_inside or 1
    first = place - place % num_inside
    timeout = timeout_of(mesh.get_group(mesh.ndim - 1), mesh.device_type)
    groups = []
    for members in (ranks[first : first + num_inside], ranks[place % num_inside :: num_inside]):
        group = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
        sent = torch.zeros(len(members), device=device_of(mesh))
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
        all_gather(torch.empty_like(sent), sent[:1], group, async_op=False)
        groups.append(group)
    return Nodes(inside=groups[0], across=groups[1], partials=policy.partials_between_nodes)


def _warn(mesh: DeviceMesh, why: str) -> None:
    if is_first_rank(mesh):
        logger.warning(
            "Gradients are reduced flat over several nodes: %s. Each rank then sends its gradients to every rank of "
            "the other nodes. Use the same power of two of ranks on each node, numbered node by node, or replicate "
            'across nodes ("zeroamp": {"dp_replicate_size": number of nodes}). "ranks_per_node": "off" silences this.',
            why,
        )
