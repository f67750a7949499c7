"""Finds the ranks of a mesh axis that share a node, from `zeroamp.ranks_per_node`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from zeroamp.policies.numbers import LOCAL_WORLD_SIZE, size_from_launcher
from zeroamp.policies.policy import Policy


def ranks_per_node(policy: Policy) -> int | None:
    """Return the number of ranks per node, from the config or the launcher; None with "off", or if neither sets it.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE in the environment is not a whole number from 1 on.
    """
    asked = policy.ranks_per_node
    if asked == "auto":
        return size_from_launcher(LOCAL_WORLD_SIZE)
    return None if asked == "off" else asked


def is_one_node(policy: Policy, num_ranks: int) -> bool:
    """Return whether all of `num_ranks` ranks share a node, as far as is known. Raises as `ranks_per_node` does."""
    per_node = ranks_per_node(policy)
    return per_node is None or per_node >= num_ranks


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
