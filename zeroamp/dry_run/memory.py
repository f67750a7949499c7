"""Memory of one rank over an optimizer step: the allocations of a traced micro-batch, and those of FSDP2.

[Note: What FSDP2 holds]
Per group, in bytes of the group's parameters padded to the number of shards (`padded_numel`):

* an all-gather: the shard cast to `param_dtype` (if it is stored in another one) until it is sent; the flat output; and
  the unsharded parameters that are copied out of it. In the forward the flat output exists until FSDP2 has waited for
  the next all-gather of the forward, or the forward has ended. In the backward, and on CPUs (where all-gathers run in
  the background, see `hooks/_torch`), it is freed at once.
* a reduction: the flat input in the communication dtype is allocated while the raw gradients still exist. Then these
  are freed, and the output is allocated in the reduce dtype; an fp32 output is the gradient shard itself. The input
  exists until the next reduction begins, or the last backward of the step has ended. All groups share one receive
  buffer per dtype for their all-to-alls. On an accelerator the buffer has the size for the largest group and is
  retained, so it counts during the whole step. On a CPU it has the size for the largest reduction so far, and is
  released at the end of the backward and before the reduction of an embedding or head that is a unit of its own
  (`zeroamp.own_units`). Such a unit has its own receive buffer meanwhile. A CPU sums in a few blocks of fp32. A sum
  over replicas needs a buffer of the shard's size, and one of a chunk's. Shards that accumulate in a low dtype are each
  added to a sum of that dtype, and all sums are cast back at the end.
* parameters that are sharded over another dimension than 0: an all-gather copies them out twice, so that all those of
  the group exist twice for a moment. A reduction first copies their gradients one by one. Each copy is freed when the
  next one is made, the last one when the reduction was issued.
* no reduction (stages 0 and 1 before the last micro-batch): the raw gradient becomes the unsharded sum, in the
  accumulation dtype.

Groups on one shard have no flat output. Streams are not modelled: on an accelerator a buffer may exist somewhat longer,
until the stream that used it is done with it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from zeroamp.dry_run.fsdp_replay import Replay
from zeroamp.dry_run.optimizer_step import PartCosts
from zeroamp.dry_run.timeline import HOST_KINDS, Timeline, TimelineWriter
from zeroamp.dry_run.traced_micro_batch import Change, Event, GradientReady, Mark, MicroBatch
from zeroamp.hooks.collectives.tree_sum import BLOCK
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.groups import GroupPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import padded_numel
from zeroamp.policies.accumulation import accumulation_dtype

MAX_MICRO_BATCHES = 3
"""Most micro-batches that are replayed. Of more, these are the first, one of the middle, which are alike, and the last.
"""


def memory_timeline(
    plan: Plan, ranks: Ranks, micro_batch: MicroBatch, optimizer: Sequence[PartCosts], *, on_cpu: bool = False
) -> Timeline:
    """Return the bytes of the first rank, which holds the most, over a step after the first one.

    `on_cpu`: whether the ranks are CPUs, which free the flat outputs of all-gathers at once.
    """
    writer = TimelineWriter()
    writer.add("inputs and buffers", micro_batch.constant_bytes)
    groups = _GroupMemory(plan, ranks, writer, on_cpu=on_cpu)
    is_offloaded = bool(plan.policy.offload_between_steps)
    writer.add("optimizer state", sum(part.state_bytes for part in optimizer) * (not is_offloaded))
    num_micro_batches = min(plan.policy.gradient_accumulation_steps, MAX_MICRO_BATCHES)
    # A Linear copies its float8 weight, divided by the scale, into the dtype of its group, one Linear at a time.
    copied = max((p.numel * p.group_key.param.itemsize for p in plan.params if p.has_own_gather_dtype), default=0)
    writer.add("workspace", copied)
    for index in range(num_micro_batches):
        groups.trace(micro_batch.events, is_first=index == 0, is_last=index + 1 == num_micro_batches)
    writer.add("workspace", -copied)
    writer.phase = "optimizer"
    groups.end_step()
    writer.add_row()
    for part in optimizer:
        writer.add("optimizer state", part.state_bytes * is_offloaded)
        for change in part.changes:
            writer.add("workspace", change)
        writer.add("optimizer state", -part.state_bytes * is_offloaded)
    return writer.timeline(HOST_KINDS if plan.policy.offload.to_cpu else (), micro_batch.host_bytes)


class _Sizes:
    """Bytes of one group's buffers, see [Note: What FSDP2 holds]."""

    def __init__(self, group: GroupPlan, plan: Plan, ranks: Ranks) -> None:
        policy, ranks = plan.policy, ranks.of(is_expert=group.is_expert)
        num_shards = ranks.shards(policy) or 1
        trained = [param for param in group.params if param.is_trainable]
        padded = sum(padded_numel(param, num_shards) for param in group.params)
        padded_trained = sum(padded_numel(param, num_shards) for param in trained)
        dtypes = group_dtypes(group.key, policy, ranks)
        self.is_sharded = num_shards > 1
        self.shard = padded // num_shards * dtypes.stored.itemsize
        self.gathered = sum(padded_numel(param, num_shards) * param.dtypes.param.itemsize for param in group.params)
        self.cast = self.gathered // num_shards if dtypes.param != dtypes.stored else 0
        if policy.offload.to_cpu:
            self.cast += self.shard  # copied to the device before it is cast
        has_partition = policy.hpz_partition_size > 1 and group.unit not in plan.own_units.lookups
        self.partition = self.gathered // policy.hpz_partition_size if has_partition else 0
        self.shares_buffer = group.unit not in plan.own_units
        other_dim = [p for p in group.params if p.shard_dim(num_shards) > 0]
        self.copied_twice = sum(p.numel * p.dtypes.param.itemsize for p in other_dim)
        self.transposed = [p.fqn for p in other_dim if p.is_trainable]
        self.raw = {p.fqn: p.numel * dtypes.param.itemsize for p in trained}
        self.summed = {p.fqn: p.numel * dtypes.unsharded_accumulate.itemsize for p in trained}
        self.sums_as_is = dtypes.param == dtypes.unsharded_accumulate
        self.communication = dtypes.communication
        self.sent = padded_trained * dtypes.communication.itemsize
        self.received = self.sent if dtypes.reduction == "all_to_all" else 0
        # A CPU adds the rows block by block, see `hooks/collectives/tree_sum.py`.
        num_blocks = max(0, (num_shards - 1).bit_length() - 1) if dtypes.reduction == "all_to_all" else 0
        self.summed_in = num_blocks * min(BLOCK, padded_trained // num_shards) * torch.float32.itemsize
        self.reduced = padded_trained // num_shards * dtypes.reduce.itemsize
        # A sum over replicas: the chunks of the other replicas, and this rank's sum.
        num_replicas = (ranks.num_replicas or 1) if dtypes.replica is not None and dtypes.sums_in_tree_order else 1
        self.of_replicas = self.reduced + self.reduced // num_replicas if num_replicas > 1 else 0
        self.gradient = padded_trained // num_shards * dtypes.stored.itemsize
        self.low_sum = padded_trained // num_shards * dtypes.sharded_accumulate.itemsize


class _GroupMemory(Replay):
    """Replays FSDP2 along a traced micro-batch, and records the allocations and frees of both."""

    def __init__(self, plan: Plan, ranks: Ranks, writer: TimelineWriter, *, on_cpu: bool) -> None:
        super().__init__(plan)
        self._writer, self._on_cpu = writer, on_cpu
        self._sizes = {group.name: _Sizes(group, plan, ranks) for group in plan.groups}
        self._group_of = {param.fqn: group.name for group in plan.groups for param in group.params}
        self._raw: Counter[str] = Counter()  # group -> bytes of its raw gradients
        self._sums: set[str] = set()  # groups with unsharded sums of earlier micro-batches
        self._with_gradient: set[str] = set()  # groups with gradient shards
        self._sums_shards_low = accumulation_dtype(plan.policy) != torch.float32 and plan.policy.stage >= 2
        self._kept_gather = 0  # bytes of the flat output of the forward's last all-gather
        self._kept_input = 0  # bytes of the flat input of the last reduction
        self._receive_buffers: Counter[torch.dtype] = Counter()  # communication dtype -> bytes
        self._partitions: set[str] = set()  # groups that are sharded over a partition
        writer.add("parameters", sum(sizes.shard for sizes in self._sizes.values()))
        whole = [param for group in plan.all_groups if group.name not in self._sizes for param in group.params]
        self._whole = {param.fqn for param in whole}  # on each rank: replicated and ignored parameters
        writer.add("parameters", sum(param.numel * param.dtypes.stored.itemsize for param in whole))
        if not on_cpu:  # retained from the step before
            for sizes in self._sizes.values():
                if sizes.shares_buffer:
                    self._receive(sizes.received, sizes.communication)

    def trace(self, events: Iterable[Event], *, is_first: bool, is_last: bool) -> None:
        """Replay a traced micro-batch."""
        self._writer.phase = "forward"
        for event in events:
            if isinstance(event, Change) and event.param in self._whole:
                self._writer.add("gradients", event.num_bytes * is_first)  # autograd adds the later ones to the first
            elif isinstance(event, Change):
                if event.kind == "unsharded gradients":
                    self._raw[self._group_of[event.param]] += event.num_bytes
                self._writer.add(event.kind, event.num_bytes)
            elif isinstance(event, Mark):
                self._reach(event, is_last)
            elif isinstance(event, GradientReady) and not is_first and event.param not in self._whole:
                self._accumulate(event)
        self.end_micro_batch(is_last=is_last)
        self._release_buffers()
        if is_last:
            self._free_input()

    def end_step(self) -> None:
        """Cast sums of shards in a low dtype back to gradients."""
        if self._sums_shards_low:
            done = [self._sizes[group] for group in self._with_gradient]
            self._writer.add("gradients", sum(sizes.gradient for sizes in done))
            self._writer.add("gradients", -sum(sizes.low_sum for sizes in done))

    def _reach(self, mark: Mark, is_last: bool) -> None:
        if mark.point == "begin forward":
            self.begin_forward(mark.unit)
        elif mark.point == "end forward":
            self.end_forward(mark.unit)
            if mark.unit == "":
                self._free_gather()
        elif mark.point == "begin backward":
            self._writer.phase = "backward"
            self.begin_backward(mark.unit)
        else:
            self.end_backward(mark.unit, is_last=is_last)

    def _accumulate(self, event: GradientReady) -> None:
        """Free a new gradient that autograd has added to the existing one."""
        group = self._group_of[event.param]
        if group in self._sums and self._sizes[group].sums_as_is:
            self._raw[group] -= event.num_bytes
            self._writer.add("unsharded gradients", -event.num_bytes)

    def all_gather_started(self, group: str) -> None:
        sizes = self._sizes[group]
        if not sizes.is_sharded:
            return
        self._writer.add("communication buffers", sizes.cast)
        self._writer.add("communication buffers", sizes.gathered)
        self._writer.add("communication buffers", -sizes.cast)

    def all_gather_ended(self, group: str, *, in_forward: bool) -> None:
        sizes = self._sizes[group]
        if in_forward:
            self._free_gather()
        self._writer.add("unsharded parameters", sizes.gathered)
        self._writer.add_and_free("communication buffers", sizes.copied_twice)
        if group in self._partitions:
            self._partitions.remove(group)
            self._writer.add("unsharded parameters", -sizes.partition)
        if not sizes.is_sharded:
            return
        if in_forward and not self._on_cpu:
            self._kept_gather = sizes.gathered
        else:
            self._writer.add("communication buffers", -sizes.gathered)

    def all_gather_discarded(self, group: str) -> None:
        if self._sizes[group].is_sharded:
            self._writer.add("communication buffers", -self._sizes[group].gathered)

    def resharded(self, group: str, *, in_forward: bool) -> None:
        sizes = self._sizes[group]
        if in_forward and sizes.partition:
            self._partitions.add(group)
            self._writer.add("unsharded parameters", sizes.partition)
        self._writer.add("unsharded parameters", -sizes.gathered)

    def backward_ended(self, group: str, *, reduces: bool) -> None:
        if reduces:
            self._free_input()
            self._reduce(group)
        else:
            self._sum(group)

    def _sum(self, group: str) -> None:
        sizes, writer = self._sizes[group], self._writer
        raw = self._raw.pop(group, 0)
        if group in self._sums:
            writer.add("unsharded gradients", -raw)
        elif raw and not sizes.sums_as_is:
            for fqn, num_bytes in sizes.summed.items():
                writer.add("unsharded gradients", num_bytes)
                writer.add("unsharded gradients", -sizes.raw[fqn])
        self._sums.add(group)

    def _reduce(self, group: str) -> None:
        sizes, writer = self._sizes[group], self._writer
        if not sizes.shares_buffer:
            self._release_buffers()
        raw, of_param = self._raw.pop(group, 0), sizes.raw
        if group in self._sums:
            self._sums.remove(group)
            of_param = sizes.summed
            writer.add("unsharded gradients", -raw)
            raw = sum(of_param.values())
        unused = max(0, sum(sizes.raw.values()) - raw)  # zeros, for parameters without a gradient
        writer.add("unsharded gradients", unused)
        last_copied = 0
        for fqn in sizes.transposed:
            writer.add("unsharded gradients", -last_copied)
            writer.add("unsharded gradients", last_copied := of_param[fqn])
        writer.add("communication buffers", sizes.sent)
        self._kept_input = sizes.sent
        # A local variable of FSDP2's `foreach_reduce` holds the last gradient; one that was copied is counted already.
        last = next(reversed(of_param), "")
        held = 0 if last in sizes.transposed or not sizes.is_sharded else min(raw, of_param.get(last, 0))
        writer.add("unsharded gradients", held - raw - unused)
        writer.add("gradients", sizes.reduced)
        if sizes.shares_buffer:
            self._receive(sizes.received, sizes.communication)
        else:
            writer.add("communication buffers", sizes.received)
        writer.add_and_free("communication buffers", sizes.summed_in * self._on_cpu)
        if not sizes.shares_buffer:
            writer.add("communication buffers", -sizes.received)
        writer.add_and_free("communication buffers", sizes.of_replicas)
        if sizes.reduced != sizes.gradient:  # cast to the stored dtype
            writer.add("gradients", sizes.gradient)
            writer.add("gradients", -sizes.reduced)
        is_first = group not in self._with_gradient
        self._with_gradient.add(group)
        if self._sums_shards_low:
            writer.add("gradients", sizes.low_sum * is_first)
        if self._sums_shards_low or not is_first:
            writer.add("gradients", -sizes.gradient)
        writer.add("unsharded gradients", -last_copied - held)

    def _release_buffers(self) -> None:
        if not self._on_cpu:
            return
        self._writer.add("communication buffers", -self._receive_buffers.total())
        self._receive_buffers.clear()

    def _receive(self, num_bytes: int, dtype: torch.dtype) -> None:
        """Replace this backward's receive buffer if it is too small. The old buffer is freed first."""
        old = self._receive_buffers[dtype]
        if num_bytes > old:
            self._writer.add("communication buffers", -old)
            self._writer.add("communication buffers", num_bytes)
            self._receive_buffers[dtype] = num_bytes

    def _free_gather(self) -> None:
        self._writer.add("communication buffers", -self._kept_gather)
        self._kept_gather = 0

    def _free_input(self) -> None:
        self._writer.add("communication buffers", -self._kept_input)
        self._kept_input = 0
