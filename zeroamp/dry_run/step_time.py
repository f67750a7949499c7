"""Models the shortest time of a step: a queue of ops and a queue of collectives, which wait for each other.

[Note: Two queues]
The time of an op is the larger of two: its FLOPs at the peak rate of its dtype, and its bytes at the memory bandwidth.
Each peak is multiplied by its efficiency (`zeroamp/dry_run/efficiency.py`). Ops run in order. Collectives run in order
too, in a queue of their own beside the ops, as FSDP2 starts them:

* an all-gather starts when the network is free and the parameters of the all-gather before it are copied out. The ops
  of the unit wait for it. The copy out is an op;
* a reduction starts when its gradients are computed and copied in (an op) and the network is free. The next reduction's
  copy waits for its end, and the optimizer waits for the last one.

The host is assumed to be always ahead. Communication is exposed while ops wait for it.

[Note: Queues of collectives]
Collectives of one communicator run one after the other, in the order in which they were started: all-gathers and
reductions wait for each other, unless `zeroamp.separate_reduce_scatter_group` is on. Then an all-gather does not wait
for a reduction: the reduction stops while the all-gather uses the links. The all-reduce over replicas, and all-gathers
over a partition (hpZ), have communicators of their own. They have a queue of their own if they use other links than the
rest: if one of the two is inside a node. `zeroamp.dry_run.network` has the times of collectives. A rank sums after the
collective, at the memory bandwidth, beside the ops. The bandwidth that this takes from the ops is not counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeroamp.dry_run.efficiency import Efficiency
from zeroamp.dry_run.events import MAX_MICRO_BATCHES, Event, Mark, Op
from zeroamp.dry_run.fsdp_replay import GroupListener, Replay
from zeroamp.dry_run.gpus import Gpu
from zeroamp.dry_run.network import Network
from zeroamp.dry_run.planned_traffic import group_collectives
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step on one rank, all its micro-batches together."""

    compute: float
    """Ops of forward and backward, and FSDP2's copies."""
    optimizer: float
    """The update, which is bound by memory bandwidth."""
    communication: float
    """The sum over all collectives."""
    latency: float
    """The part of `communication` that is latency, not transfer of bytes."""
    sums: float
    """Sums over ranks that the ranks compute themselves, after all-to-alls."""
    exposed: float
    """How long ops wait for collectives and sums."""
    flops: int
    """FLOPs of matrix products, convolutions and attention, recomputation included."""

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
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
    """Return the time of one optimizer step on one rank. See [Note: Two queues].

    Args:
        plan: of the model.
        ranks: of the mesh.
        events: of one traced micro-batch.
        moved_by_optimizer: bytes that the update reads and writes.
        gpu: peak rates of the GPU.
        network: times of collectives.
        efficiency: fractions of the peak rates that are reached.
    """
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
    now, busy, sent, latency, sums = (
        sum(weight * difference[i] for weight, difference in zip(weights, differences, strict=True)) for i in range(5)
    )
    return StepTime(
        compute=busy,
        optimizer=moved_by_optimizer / (gpu.memory_gb_per_s * 1e9 * efficiency.memory),
        communication=sent,
        latency=latency,
        sums=sums,
        exposed=now - busy,
        flops=num_micro_batches * sum(event.flops for event in events if isinstance(event, Op)),
    )


class _Clock(GroupListener):
    """The two queues. A replay of FSDP2 calls it when all-gathers and reductions start and end."""

    def __init__(self, plan: Plan, ranks: Ranks, gpu: Gpu, network: Network, efficiency: Efficiency) -> None:
        self._replay = Replay(plan, self)
        self._network = network
        self._partition = plan.policy.hpz_partition_size
        self._num_shards = ranks.shards(plan.policy) or 1
        self._num_replicas = ranks.num_replicas or 1
        self._reductions = "reductions" if plan.policy.separate_reduce_scatter_group else "gathers"
        self._shards_are_inside = network.nodes_of(self._num_shards) == 1
        self._partition_is_inside = network.nodes_of(max(1, self._partition)) == 1 and not self._shards_are_inside
        uses_tf32 = torch.get_float32_matmul_precision() != "highest"
        fp32 = gpu.tf32_tflops if uses_tf32 else gpu.fp32_tflops
        self._low, self._fp32 = (peak * 1e12 * efficiency.compute for peak in (gpu.low_tflops, fp32))
        self._memory = gpu.memory_gb_per_s * 1e9 * efficiency.memory
        of_group = {group.name: ranks.of(is_expert=group.is_expert).shards(plan.policy) for group in plan.groups}
        self._shards_of = {name: num_shards or 1 for name, num_shards in of_group.items()}
        self._calls = {  # the collectives of one all-gather and one reduction, and the bytes of each
            group.name: [
                (call, sum(call.num_bytes(param, of_group[group.name]) for param in group.params))
                for call in group_collectives(group, plan, ranks)
            ]
            for group in plan.groups
        }
        self._copied_twice = {  # elements that are sharded over another dimension than 0: they are copied once more
            group.name: sum(p.numel for p in group.params if p.shard_dim(of_group[group.name]) > 0)
            for group in plan.groups
        }
        self._is_last = True  # whether the micro-batch is the last of its optimizer step
        self._partitioned: set[str] = set()  # groups that are sharded over a partition
        self._now = 0.0  # time in the queue of ops
        self._busy = 0.0  # how long ops ran
        # When each queue of collectives is free. See [Note: Queues of collectives]
        self._free = {"gathers": 0.0, "reductions": 0.0, "replicas": 0.0, "partition": 0.0}
        self._sent = 0.0  # how long collectives ran
        self._latency = 0.0  # the part of it that is latency
        self._summed = 0.0  # how long the rank's own sums ran
        self._gathered: dict[str, float] = {}  # group -> when its all-gather is done
        self._copied = 0.0  # when the last all-gather was copied out
        self._reduced = 0.0  # when the last reduction is done
        self._all_reduced = 0.0  # when the last all-reduce over replicas is done

    def read(self) -> tuple[float, float, float, float, float]:
        """Return the time so far, and how long ops, collectives, their latencies, and the rank's own sums ran."""
        return self._now, self._busy, self._sent, self._latency, self._summed

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
            self._now = max(self._now, self._reduced, self._all_reduced)

    def all_gather_started(self, group: str) -> None:
        for call, num_bytes in self._calls[group]:
            if not call.is_of_gradients:
                if group in self._partitioned:
                    parts = self._network.parts(call.collective, num_bytes, self._partition)
                    queue = "partition" if self._partition_is_inside else "gathers"
                else:
                    parts, queue = self._network.gather_parts(num_bytes, self._shards_of[group]), "gathers"
                self._gathered[group] = self._send(queue, parts, self._copied)
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
            if call.collective == "all_reduce":
                parts = self._network.parts(call.collective, num_bytes, self._num_replicas, self._shards_of[group])
                queue = "replicas" if self._shards_are_inside else self._reductions
                self._all_reduced = self._send(queue, parts, max(self._now, self._reduced))
            else:
                of = (call.collective, num_bytes, call.dtype.itemsize, self._shards_of[group])
                sent = self._send(self._reductions, self._network.reduce_parts(*of), self._now)
                seconds = self._network.sum_bytes(*of) / self._memory
                self._summed += seconds
                self._reduced = sent + seconds

    def _compute(self, seconds: float) -> None:
        self._now += seconds
        self._busy += seconds

    def _send(self, queue: str, parts: tuple[float, float], earliest: float) -> float:
        """Run a collective in a queue, not before `earliest`, and return when it is done. `parts`: see `Network`."""
        seconds, free = sum(parts), self._free
        start = max(free[queue], earliest)
        if queue == "reductions":
            start = max(start, free["gathers"])
        free[queue] = start + seconds
        if queue == "gathers" and free["reductions"] > start:  # the running reduction stops for as long
            free["reductions"] += seconds
            self._reduced += seconds
        self._sent += seconds
        self._latency += parts[0]
        return free[queue]
