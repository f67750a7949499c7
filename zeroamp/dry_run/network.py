"""Models the time of one collective (bytes over bandwidth, and the latency of hops), and the memory that NCCL takes.

[Note: Collectives]
With n ranks and B the bytes of the unsharded tensor (the convention of `zeroamp.Traffic`):

* all-gather, reduce-scatter: a ring moves B (n - 1) / n through every link; an all-reduce twice that. A ring that
  leaves the node has the bandwidth of all network cards of the node together (NCCL runs one ring per card), but at most
  that of the links inside the node.
* all-to-all: a rank sends B / n to each other rank. What leaves the node passes through the rank's own network card. So
  across nodes an all-to-all takes longer than a reduce-scatter of the same bytes, at most by the number of cards of a
  node.
* in two levels, with g ranks per node and m = n / g nodes: an all-to-all inside the node, a sum in fp32, an all-to-all
  of these partial sums between the ranks with the same place in their nodes, and another sum. An all-gather goes the
  other way round: between the nodes, then inside. So in a reduction a card sends 4 / w x B / g (m - 1) / m, where w is
  the bytes per element of the gradients that are sent, instead of B (n - g) / n.

[Note: Latency]
The constants are those by which NCCL chooses its algorithms (NCCL, src/graph/tuning.cc, `baseLat` and `hwLat`, as of
2.2x): microseconds per call and per hop over NVLink, PCIe or a network, for the protocols LL128 and Simple. A ring of n
ranks on m nodes makes n - 1 hops, of which m - 1 leave a node; an all-reduce twice as many. A tree makes
2 (n / m - 1 + log2 m) of them. LL128 sends 120 bytes of data in 128, and NCCL uses it with NVLink only. As in NCCL, the
fastest of these is taken. NCCL has no constants for sends to single ranks. The assumption here is that an all-to-all
serves `PEERS_AT_ONCE` ranks at a time, each with one hop.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from zeroamp.hooks.collectives.traffic import Collective
from zeroamp.policies.policy import Policy


class _Protocol(NamedTuple):
    """Microseconds of a call (base) and of a hop by link, and the fraction of the bandwidth that carries data."""

    base: float
    nvlink: float
    pcie: float
    net: float
    bandwidth: float


_SIMPLE_RING = _Protocol(8.4, 3.4, 5.7, 14.0, 1.0)
_LL128_RING = _Protocol(14.0, 1.9, 2.5, 4.0, 120 / 128)
# NCCL gives a tree 0.9 of a ring's bandwidth.
_SIMPLE_TREE = _Protocol(8.4, 4.0, 4.0, 14.0, 0.9)
_LL128_TREE = _Protocol(14.0, 1.25, 1.9, 8.5, 0.9 * 120 / 128)

PEERS_AT_ONCE = 8
"""Ranks that an all-to-all sends to at the same time. An assumption."""

FASTEST_PCIE_GB_PER_S = 64
"""Links inside a node count as PCIe (5.0 x16) up to this bandwidth, in 10^9 bytes per second, one direction."""

BYTES_OF_FIRST_COMMUNICATOR = 1_060_000_000
"""GPU memory of a process with one NCCL communicator of a ring, the driver's context included. A user measured it on
8 x H100 (https://github.com/NVIDIA/nccl/issues/1685)."""
BYTES_OF_COMMUNICATOR = 500_000_000
"""GPU memory of each further communicator. An assumption: the first one's without the driver's context, about half."""
BYTES_PER_PEER = 32 * 14 * 2**20
"""GPU memory of an all-to-all per other rank of the node: 32 channels, each with buffers of 10, 2 and 2 MiB. For 7
ranks this is the 3.28 GB that the same user measured at the first all-to-all. Peers in other nodes share buffers, which
are not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The links between ranks. Ranks are numbered node by node."""

    gpus_per_node: int
    intra_gb_per_s: float
    """10^9 bytes per second, one direction, from a GPU into its node."""
    inter_gb_per_s: float
    """The same to other nodes, per GPU."""
    efficiency: float
    """The fraction of these bandwidths that collectives reach."""
    ranks_per_node: int = 1
    """Ranks per node of two-level collectives over the shards. 1: collectives run in one level. See `two_levels`."""
    partial_itemsize: int = 4
    """Bytes per element of partial sums between nodes, by `zeroamp.partials_between_nodes`."""

    def nodes_of(self, num_ranks: int, stride: int = 1) -> int:
        """Return the number of nodes that ranks 0, stride, 2 stride, … are on."""
        return math.ceil(num_ranks / self._per_node(num_ranks, stride))

    def _per_node(self, num_ranks: int, stride: int) -> int:
        return max(1, min(num_ranks, self.gpus_per_node // stride))

    def ring_bytes_per_s(self, num_ranks: int, stride: int) -> float:
        """Return the bytes per second that a ring over ranks 0, stride, 2 stride, … moves."""
        per_node = self._per_node(num_ranks, stride)
        is_inside = self.nodes_of(num_ranks, stride) == 1
        slowest = self.intra_gb_per_s if is_inside else min(self.intra_gb_per_s, per_node * self.inter_gb_per_s)
        return slowest * 1e9 * self.efficiency

    def seconds(self, collective: Collective, num_bytes: int | float, num_ranks: int, stride: int = 1) -> float:
        """Return the seconds of one call. See [Note: Collectives] and [Note: Latency].

        Args:
            collective: the kind of collective.
            num_bytes: bytes of the unsharded tensor.
            num_ranks: size of the process group.
            stride: difference of the global ranks of two neighbours in the group.
        """
        return sum(self.parts(collective, num_bytes, num_ranks, stride))

    def parts(
        self, collective: Collective, num_bytes: int | float, num_ranks: int, stride: int = 1
    ) -> tuple[float, float]:
        """Return the time of one call as (latency, time of the bytes), both in seconds."""
        if num_ranks == 1:
            return 0.0, 0.0
        if collective == "all_to_all":
            inside = self._per_node(num_ranks, stride)
            part = num_bytes / num_ranks / (1e9 * self.efficiency)
            intra, inter = part * (inside - 1) / self.intra_gb_per_s, part * (num_ranks - inside) / self.inter_gb_per_s
            return self._latency_of_peers(inside - 1, num_ranks - inside), max(intra, inter)
        nodes = self.nodes_of(num_ranks, stride)
        rounds = 2 if collective == "all_reduce" else 1
        per_ring = rounds * num_bytes * (num_ranks - 1) / num_ranks / self.ring_bytes_per_s(num_ranks, stride)
        in_node, between = rounds * (num_ranks - nodes), rounds * (nodes - 1)
        found = [self._by(protocol, in_node, between, per_ring) for protocol in self._usable(_SIMPLE_RING, _LL128_RING)]
        if collective == "all_reduce":
            in_tree, up = 2 * (math.ceil(num_ranks / nodes) - 1), 2 * int(math.log2(nodes))
            of_tree = 2 * num_bytes / self.ring_bytes_per_s(num_ranks, stride)
            found += [self._by(protocol, in_tree, up, of_tree) for protocol in self._usable(_SIMPLE_TREE, _LL128_TREE)]
        return min(found, key=sum)

    @property
    def _is_pcie(self) -> bool:
        return self.intra_gb_per_s <= FASTEST_PCIE_GB_PER_S

    def _usable(self, simple: _Protocol, ll128: _Protocol) -> list[_Protocol]:
        return [simple] if self._is_pcie else [simple, ll128]

    def _by(self, protocol: _Protocol, in_node: int, between: int, seconds: float) -> tuple[float, float]:
        hop = protocol.pcie if self._is_pcie else protocol.nvlink
        return (protocol.base + in_node * hop + between * protocol.net) * 1e-6, seconds / protocol.bandwidth

    def _latency_of_peers(self, num_inside: int, num_outside: int) -> float:
        inside, outside = (math.ceil(number / PEERS_AT_ONCE) for number in (num_inside, num_outside))
        return self._by(_SIMPLE_RING, inside, outside, 0.0)[0]

    def levels(self, num_ranks: int) -> tuple[int, int] | None:
        """Return (ranks per node, nodes) if collectives over `num_ranks` neighbours run in two levels, else None."""
        size = self.ranks_per_node
        return (size, num_ranks // size) if size > 1 and num_ranks > size and num_ranks % size == 0 else None

    def gather_parts(self, num_bytes: int, num_ranks: int) -> tuple[float, float]:
        """Return (latency, time of the bytes) in seconds of an all-gather over the shards, in one or two levels."""
        if (levels := self.levels(num_ranks)) is None:
            return self.parts("all_gather", num_bytes, num_ranks)
        size, nodes = levels
        between = self.parts("all_gather", num_bytes / size, nodes, size)
        inside = self.parts("all_gather", num_bytes, size)
        return between[0] + inside[0], between[1] + inside[1]

    def reduce_parts(
        self, collective: Collective, num_bytes: int, itemsize: int, num_ranks: int
    ) -> tuple[float, float]:
        """Return (latency, time of the bytes) in seconds of a reduction. `itemsize`: bytes per element that is sent.

        Only all-to-alls, whose results the ranks sum themselves, run in two levels.
        """
        levels = self.levels(num_ranks)
        if levels is None or collective != "all_to_all":
            return self.parts(collective, num_bytes, num_ranks)
        size, nodes = levels
        inside = self.parts("all_to_all", num_bytes, size)
        between = self.parts("all_to_all", self.partial_itemsize * num_bytes / itemsize / size, nodes, size)
        return inside[0] + between[0], inside[1] + between[1]

    def sum_bytes(self, collective: Collective, num_bytes: int, itemsize: int, num_ranks: int) -> float:
        """Return the bytes that a rank reads and writes when it sums a reduction itself; 0 if the backend sums.

        With E elements that is (w + 4 / n) E bytes: the received elements and an fp32 result. In two levels the partial
        sums are written and read too: (w + 8 / g + 4 / n) E.
        """
        if collective != "all_to_all":
            return 0.0
        numel, levels = num_bytes / itemsize, self.levels(num_ranks)
        return num_bytes + 4 * numel / num_ranks + (0 if levels is None else 8 * numel / levels[0])

    def nccl_bytes(
        self, *, num_shards: int, num_replicas: int, num_partitions: int, all_to_all: bool, separate: bool
    ) -> int:
        """Return the GPU memory that NCCL takes outside of torch's allocator, the driver's context included.

        The sum of the constants of this file: the first communicator; one more each for replicas, separate reductions
        and the second level; one for each group with a partition (hpZ); and the buffers of all-to-alls inside the node.

        Args:
            num_shards: ranks that a parameter is sharded over.
            num_replicas: ranks that hold the same shard.
            num_partitions: groups that are resharded over a secondary partition, each with a communicator of its own.
            all_to_all: whether gradients are sent by all-to-alls.
            separate: whether reductions have a communicator of their own.
        """
        if num_shards * num_replicas == 1:
            return 0
        in_two_levels = self.levels(num_shards) is not None
        further = (num_shards > 1 and num_replicas > 1) + num_partitions + separate + in_two_levels
        num_peers = self._per_node(num_shards, 1) - 1 if all_to_all else 0
        return BYTES_OF_FIRST_COMMUNICATOR + further * BYTES_OF_COMMUNICATOR + num_peers * BYTES_PER_PEER


ITEMSIZE_OF_PARTIALS = {"fp32": 4, "bf16": 2}
"""Value of `zeroamp.partials_between_nodes` -> bytes per element."""


def two_levels(policy: Policy, gpus_per_node: int) -> int:
    """Return the ranks per node of two-level collectives by a config. 1: collectives run in one level."""
    asked = gpus_per_node if policy.ranks_per_node == "auto" else policy.ranks_per_node
    is_used = asked != "off" and policy.reduce_accumulate_dtype == "fp32"
    return int(asked) if is_used and int(asked) & (int(asked) - 1) == 0 else 1
