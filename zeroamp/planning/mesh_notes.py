"""What costs a run of many ranks more than it must, as far as the numbers of ranks and the plan say it."""

import os

from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.traffic import padded_numel

MOST_PADDING = 0.05
"""Padding, as a part of the elements of the sharded parameters, from which on it is noted."""
LEAST_PADDING_NUMEL = 2**20
"""Elements of padding below which it is not: those of small models cost nothing."""
LONGEST_RING = 1024
"""Ranks of a ring from which on its latency is noted: each collective waits for one hop after the other."""


def ranks_of_host() -> int | None:
    """Return how many ranks run on this host, as torchrun's environment says it; None where it does not."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdigit() and int(number) > 0 else None


def mesh_notes(plan: Plan, ranks: Ranks, ranks_per_host: int | None) -> str | None:
    """Return one line about padding, long rings and all-to-alls between hosts on these ranks; None if there is none.

    Reads numbers only. `ranks_per_host` None: not known, and nothing is said of hosts.
    """
    num_shards = ranks.shards(plan.policy) or 1
    params = [param for group in plan.groups for param in group.params]
    numel = sum(param.numel for param in params)
    padding = sum(padded_numel(param, num_shards) for param in params) - numel
    notes = []
    if padding > MOST_PADDING * numel and padding >= LEAST_PADDING_NUMEL:
        notes.append(f"{padding / numel:.0%} of padding is held and communicated beside the parameters")
    in_levels = (getattr(plan.policy, "ranks_per_node", None) or 1) != 1
    if num_shards > LONGEST_RING and not in_levels:
        notes.append(f"all-gathers are rings of {num_shards:,} ranks, whose latency grows with the ranks")
    if ranks_per_host is not None and num_shards > ranks_per_host and not in_levels:
        exchanged = [g for g in plan.groups if group_dtypes(g.key, plan.policy, ranks).reduction == "all_to_all"]
        if exchanged:
            notes.append(
                f"gradients go between hosts of {ranks_per_host} ranks by all-to-alls, which send up to "
                f"{ranks_per_host} times the bytes of a ring through each network card"
            )
    if not notes:
        return None
    return (
        f"Sharded over {num_shards:,} ranks: {'; '.join(notes)}. More replicas (zeroamp.dp_replicate_size, or a mesh) "
        "avoid it where memory allows: `zeroamp plan` compares meshes."
    )
