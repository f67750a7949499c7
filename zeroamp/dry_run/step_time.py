"""The shortest time of a step: two queues, of ops and of collectives, that wait for each other.

[Note: Two queues]
An op takes the larger of its floating-point operations at the peak of its dtype and its bytes at the memory's
bandwidth, each times the efficiency that is assumed. Ops run one after the other. Collectives run one after the other
too, in a queue of their own, beside the ops, as FSDP2 starts them:

* an all-gather starts when the network is free and the unsharded parameters of the all-gather before it are copied out;
  the ops of the unit wait for it, and the copy out is an op;
* a reduction starts when its gradients are there, are copied in (an op) and the network is free; the next one's copy
  waits until it is done, and so does the optimizer for the last.

The host is taken to be always ahead. Communication is exposed where ops wait for it. All-gathers and reductions are in
one queue, although a full-duplex network may overlap them to some extent.

[Note: Collectives]
With n ranks and B the bytes of the unsharded tensor (the convention of `zeroamp.Traffic`):

* all-gather, reduce-scatter: a ring moves B (n - 1) / n through every link; an all-reduce twice that. A ring that
  leaves the node is as fast as the node's cards together (as many rings run as there are cards), at most as fast as the
  links inside.
* all-to-all: a rank sends B / n to each other one. Those outside of its node go through its own card; so across nodes
  an all-to-all of the same bytes takes longer than a reduce-scatter, up to as many times as a node has cards.

Latency is not in it: with thousands of ranks and small groups it adds to every collective.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeroamp.dry_run.events import MAX_MICRO_BATCHES, Event, Mark, Op
from zeroamp.dry_run.gpus import Gpu
from zeroamp.hooks.collectives.traffic import Collective
from zeroamp.planning.fsdp_replay import GroupListener, Replay
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.traffic import group_collectives


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """The part of the peaks that is reached. The defaults are round assumptions, not measurements."""

    compute: float = 0.7
    memory: float = 0.8
    network: float = 0.8


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step on one rank, all its micro-batches together."""

    compute: float
    """Ops of forward and backward, and FSDP2's copies."""
    optimizer: float
    """The update, which is bound by memory."""
    communication: float
    """All collectives, one after the other."""
    exposed: float
    """What ops wait for."""
    flops: int
    """Of matrix products, convolutions and attention, recomputation included."""

    @property
    def total(self) -> float:
        """Return the step's time."""
        return self.compute + self.optimizer + self.exposed


def step_time(
    plan: Plan,
    ranks: Ranks,
    events: Sequence[Event],
    moved_by_optimizer: int,
    *,
    gpu: Gpu,
    network: Network,
    efficiency: Efficiency,
) -> StepTime:
    """Return the time of one optimizer step. See [Note: Two queues]."""
    clock = _Clock(plan, ranks, gpu, network, efficiency)
    num_micro_batches = plan.policy.gradient_accumulation_steps
    num_run = min(num_micro_batches, MAX_MICRO_BATCHES)
    states = [clock.read()]
    for index in range(num_run):
        clock.micro_batch(events, is_last=index + 1 == num_run)
        states.append(clock.read())
    differences = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(states)]
    weights = [1] * num_run
    if num_run == MAX_MICRO_BATCHES:
        weights[1] += num_micro_batches - num_run
    now, busy, sent = (
        sum(weight * difference[i] for weight, difference in zip(weights, differences, strict=True)) for i in range(3)
    )
    return StepTime(
        compute=busy,
        optimizer=moved_by_optimizer / (gpu.memory_gb_per_s * 1e9 * efficiency.memory),
        communication=sent,
        exposed=now - busy,
        flops=num_micro_batches * sum(event.flops for event in events if isinstance(event, Op)),
    )


class _Clock(GroupListener):
    """The two queues. Listens to the replay, which has what starts when."""

    def __init__(self, plan: Plan, ranks: Ranks, gpu: Gpu, network: Network, efficiency: Efficiency) -> None:
        self._replay = Replay(plan, self)
        self._network = network
        self._partition = plan.policy.hpz_partition_size
        self._num_shards = ranks.shards(plan.policy) or 1
        self._num_replicas = ranks.num_replicas or 1
        uses_tf32 = torch.get_float32_matmul_precision() != "highest"
        fp32 = gpu.tf32_tflops if uses_tf32 else gpu.fp32_tflops
        self._low, self._fp32 = (peak * 1e12 * efficiency.compute for peak in (gpu.low_tflops, fp32))
        self._memory = gpu.memory_gb_per_s * 1e9 * efficiency.memory
        self._calls = {  # the collectives of one all-gather and one reduction, and the bytes of each
            group.name: [
                (call, sum(call.num_bytes(param, ranks.shards(plan.policy)) for param in group.params))
                for call in group_collectives(group, plan, ranks)
            ]
            for group in plan.groups
        }
        self._copied_twice = {  # elements that are copied once more: of other sharded dimensions than 0
            group.name: sum(p.numel for p in group.params if p.shard_dim(ranks.shards(plan.policy)) > 0)
            for group in plan.groups
        }
        self._is_last = True  # whether the micro-batch is the last of its optimizer step
        self._partitioned: set[str] = set()  # groups that are sharded over a partition
        self._now = 0.0  # of the ops
        self._busy = 0.0  # how long ops ran
        self._free = 0.0  # when the network is
        self._sent = 0.0  # how long it ran
        self._gathered: dict[str, float] = {}  # group -> when its gather is done
        self._copied = 0.0  # when the last gather was copied out
        self._reduced = 0.0  # when the last reduction is done

    def read(self) -> tuple[float, float, float]:
        """Return the time, how long ops ran, and how long the network did."""
        return self._now, self._busy, self._sent

    def micro_batch(self, events: Iterable[Event], *, is_last: bool) -> None:
        self._is_last = is_last
        for event in events:
            if isinstance(event, Op):
                peak = self._low if event.is_low else self._fp32
                self._compute(max(event.flops / peak, event.num_bytes / self._memory))
            elif isinstance(event, Mark):
                event.reach(self._replay, is_last=is_last)
        self._replay.end_micro_batch(is_last=is_last)
        if is_last:
            self._now = max(self._now, self._reduced)

    def all_gather_started(self, group: str) -> None:
        for call, num_bytes in self._calls[group]:
            if not call.is_of_gradients:
                num_ranks = self._partition if group in self._partitioned else self._num_shards
                seconds = self._network.seconds(call.collective, num_bytes, num_ranks)
                self._gathered[group] = self._send(seconds, self._copied)
        self._partitioned.discard(group)

    def all_gather_ended(self, group: str, *, in_forward: bool) -> None:
        del in_forward
        self._now = max(self._now, self._gathered.pop(group, 0.0))
        for call, num_bytes in self._calls[group]:
            if not call.is_of_gradients:
                num_bytes += self._copied_twice[group] * call.dtype.itemsize
                self._compute(2 * num_bytes / self._memory)
        self._copied = self._now

    def all_gather_discarded(self, group: str) -> None:
        self._gathered.pop(group, None)

    def resharded(self, group: str, *, in_forward: bool) -> None:
        if in_forward and self._partition > 1:
            self._partitioned.add(group)

    def backward_ended(self, group: str, *, reduces: bool) -> None:
        calls = [
            (call, num_bytes)
            for call, num_bytes in self._calls[group]
            if call.is_of_gradients and (self._is_last or not call.is_in_last_only)
        ]
        if not reduces or not calls:
            return
        self._now = max(self._now, self._reduced)
        copied = calls[0][1] + self._copied_twice[group] * calls[0][0].dtype.itemsize
        self._compute(2 * copied / self._memory)
        for call, num_bytes in calls:
            is_over_replicas = call.collective == "all_reduce"
            num_ranks = self._num_replicas if is_over_replicas else self._num_shards
            stride = self._num_shards if is_over_replicas else 1
            self._reduced = self._send(self._network.seconds(call.collective, num_bytes, num_ranks, stride), self._now)

    def _compute(self, seconds: float) -> None:
        self._now += seconds
        self._busy += seconds

    def _send(self, seconds: float, earliest: float) -> float:
        self._free = max(self._free, earliest) + seconds
        self._sent += seconds
        return self._free
