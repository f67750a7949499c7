"""Finds avoidable costs of a run on many ranks, from the numbers of ranks and the plan alone."""

from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.nodes import nodes_of_axis
from zeroamp.planning.plan import Plan
from zeroamp.planning.traffic import padded_numel

MOST_PADDING = 0.05
"""Padding above this part of the elements of the sharded parameters is noted."""
LEAST_PADDING_NUMEL = 2**20
"""Padding of fewer elements than this is not noted: that of small models costs nothing."""
LONGEST_RING = 1024
"""The latency of a ring of more ranks than this is noted: each collective waits for one hop after the other."""


def mesh_notes(plan: Plan, ranks: Ranks, per_node: int | None, why_flat: str | None = None) -> str | None:
    """Return one line about padding, long rings and all-to-alls between nodes on these ranks; None if there is none.

    Reads numbers only.

    Args:
        plan: of the model.
        ranks: the mesh's ranks.
        per_node: ranks of one node, from `ranks_per_node`. None: not known, and no note is about nodes.
        why_flat: why reductions between nodes have one level, if the mesh is known. None: as the numbers show.
    """
    num_shards = ranks.shards(plan.policy) or 1
    params = [(param, ranks.of(is_expert=group.is_expert)) for group in plan.groups for param in group.params]
    numel = sum(param.numel for param, _ in params)
    padding = sum(padded_numel(param, own.shards(plan.policy) or 1) for param, own in params) - numel
    notes = []
    if padding > MOST_PADDING * numel and padding >= LEAST_PADDING_NUMEL:
        notes.append(f"{padding / numel:.0%} of padding is held and communicated beside the parameters")
    layout = nodes_of_axis(range(num_shards), per_node) if per_node is not None else None
    if layout is not None and layout.is_uneven and why_flat is None:
        why_flat = f"nodes of {per_node} ranks do not divide the ranks that shard into equal blocks of a power of two"
    is_two_level = layout is not None and layout.is_two_level and why_flat is None
    if num_shards > LONGEST_RING and not is_two_level:
        notes.append(f"all-gathers are rings of {num_shards:,} ranks, whose latency grows with the ranks")
    dtypes = [group_dtypes(group.key, plan.policy, ranks) for group in plan.groups]
    if why_flat is not None and any(each.reduction == "all_to_all" for each in dtypes):
        notes.append(
            "gradients go between nodes by flat all-to-alls, which send up to as many times the bytes of a ring "
            f"through each network card as a node has ranks, because {why_flat}"
        )
    if not notes:
        return None
    return (
        f"Sharded over {num_shards:,} ranks: {'; '.join(notes)}. More replicas (zeroamp.dp_replicate_size, or a mesh) "
        'avoid it where memory allows: `zeroamp plan` compares meshes. "ranks_per_node": "off" silences what is said '
        "of nodes."
    )
