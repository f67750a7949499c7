"""How long a collective takes, from bytes and bandwidths alone.

[Note: Collectives]
With n ranks and B the bytes of the unsharded tensor (the convention of `zeroamp.Traffic`):

* all-gather, reduce-scatter: a ring moves B (n - 1) / n through every link; an all-reduce twice that. A ring that
  leaves the node is as fast as the node's cards together (as many rings run as there are cards), at most as fast as the
  links inside.
* all-to-all: a rank sends B / n to each other one. Those outside of its node go through its own card; so across nodes
  an all-to-all of the same bytes takes longer than a reduce-scatter, up to as many times as a node has cards.

Latency is not in it: with thousands of ranks and small groups it adds to every collective.
"""

from dataclasses import dataclass

from zeroamp.hooks.collectives.traffic import Collective


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The links between ranks. Ranks are numbered node by node."""

    gpus_per_node: int
    intra_gb_per_s: float
    """10^9 bytes per second, one direction, from an accelerator into its node."""
    inter_gb_per_s: float
    """The same to other nodes, per accelerator."""
    efficiency: float
    """The part of these that collectives reach."""

    def ring_bytes_per_s(self, num_ranks: int, stride: int) -> float:
        """Return what a ring over ranks 0, stride, 2 stride, … moves per second."""
        per_node = max(1, min(num_ranks, self.gpus_per_node // stride))
        is_inside = num_ranks * stride <= self.gpus_per_node
        slowest = self.intra_gb_per_s if is_inside else min(self.intra_gb_per_s, per_node * self.inter_gb_per_s)
        return slowest * 1e9 * self.efficiency

    def seconds(self, collective: Collective, num_bytes: int, num_ranks: int, stride: int = 1) -> float:
        """Return the time of one call. See [Note: Collectives].

        Args:
            collective: which.
            num_bytes: of the unsharded tensor.
            num_ranks: of its process group.
            stride: between the numbers of two neighbouring ranks of the group.
        """
        if num_ranks == 1:
            return 0.0
        if collective == "all_to_all":
            inside = min(num_ranks, max(1, self.gpus_per_node // stride))
            part = num_bytes / num_ranks / (1e9 * self.efficiency)
            intra, inter = self.intra_gb_per_s, self.inter_gb_per_s
            return max(part * (inside - 1) / intra, part * (num_ranks - inside) / inter)
        rounds = 2 if collective == "all_reduce" else 1
        return rounds * num_bytes * (num_ranks - 1) / num_ranks / self.ring_bytes_per_s(num_ranks, stride)
