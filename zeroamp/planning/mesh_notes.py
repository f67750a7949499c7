"""Finds avoidable costs of training on many ranks, from the plan and the numbers of ranks."""

from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.nodes import nodes_of_axis
from zeroamp.planning.plan import Plan
from zeroamp.planning.traffic import padded_numel

MOST_PADDING = 0.05
"""Padding above this part of the elements of the sharded parameters is noted."""
LEAST_PADDING_NUMEL = 2**20
"""Padding of fewer elements than this is not noted, because it costs small models little."""
LONGEST_RING = 1024
"""The latency of a ring of more ranks than this is noted. A collective takes as many hops as the ring has ranks."""


def mesh_notes(plan: Plan, ranks: Ranks, per_node: int | None, why_flat: str | None = None) -> str | None:
    """Return one line about padding, long rings and all-to-alls between nodes; None if there is nothing to note.

    Args:
        plan: of the model.
        ranks: the mesh's ranks.
        per_node: ranks of one node, from `ranks_per_node`. None if not known: the line is then not about nodes.
        why_flat: why reductions between nodes have one level, if the mesh is known. None: decided from `per_node`.
    """
    num_shards = ranks.shards(plan.policy) or 1
    params = [(param, ranks.of(is_expert=group.is_expert)) for group in plan.groups for param in group.params]
    numel = sum(param.numel for param, _ in params)
    padding = sum(padded_numel(param, own.shards(plan.policy) or 1) for param, own in params) - numel
    notes = []
    if padding > MOST_PADDING * numel and padding >= LEAST_PADDING_NUMEL:
        notes.append(f"padding adds {padding / numel:.0%} to the parameters, in memory and in communication")
    layout = nodes_of_axis(range(num_shards), per_node) if per_node is not None else None
    if layout is not None and layout.is_uneven and why_flat is None:
        why_flat = f"nodes of {per_node} ranks do not divide the ranks that shard into equal blocks of a power of two"
    is_two_level = layout is not None and layout.is_two_level and why_flat is None
    if num_shards > LONGEST_RING and not is_two_level:
        notes.append(f"all-gathers are rings of {num_shards:,} ranks, whose latency grows with the number of ranks")
    dtypes = [group_dtypes(group.key, plan.policy, ranks) for group in plan.groups]
    if why_flat is not None and any(each.reduction == "all_to_all" for each in dtypes):
        notes.append(
            "gradients are sent between nodes by all-to-alls in one level. With g ranks per node, these send up to g "
            f"times the bytes of a ring through each network card. Reductions have one level because {why_flat}"
        )
    if not notes:
        return None
    return (
        f"Sharded over {num_shards:,} ranks: {'; '.join(notes)}. More replicas (zeroamp.dp_replicate_size, or a mesh) "
        'avoid this, if memory allows: `zeroamp plan` compares meshes. With "ranks_per_node": "off" nothing is logged '
        "about nodes."
    )
