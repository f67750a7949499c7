"""Predicts when FSDP2 all-gathers and reduces each group in one optimizer step.

It replays FSDP2's schedule on the names of a `Plan`, without tensors or ranks.

[Note: What is replayed]
The rule: a group that is resharded after its forward is all-gathered twice per micro-batch, any other group once. Each
backward that reduces gradients reduces a group once. The exceptions:

* The backward of a group prefetches the group that is before it in FSDP2's record of forwards. FSDP2 clears the record
  after the last backward of an optimizer step only. So the backward of a later micro-batch's first unit prefetches the
  last group of the micro-batch before. That is usually the root's or the model-wide group, which is still unsharded:
  nothing is communicated. In a model without both it is the last unit. With accumulation, this is one more all-gather
  per step, whose result is not used.
* A unit without a backward (frozen, and nothing trainable before it) is prefetched all the same. Between two
  micro-batches the next forward uses that copy. After the last micro-batch it is discarded.
* A unit that runs several times in one forward is all-gathered for each run, and reduced once, after the backward of
  its first run: see [Note: Reducing once] in `hooks/group_gradients.py`.
* An embedding that is a unit of its own is not all-gathered for its backward.
* `prefetch_bucket_size` prefetches in the order of registration.
* Groups that autograd has not reached are reduced at the end of the backward, in zeroamp's own order.

So the numbers hold for modules that run in the order of `run_order`. A model that runs them in another order may
all-gather a unit once more or once less. A model that skips a unit saves its all-gathers and reductions.
"""

from dataclasses import dataclass, field
from typing import Literal

from zeroamp.planning.groups import GroupKind
from zeroamp.planning.plan import Plan
from zeroamp.planning.run_order import UnitRun
from zeroamp.planning.schedule import backward_order, fits, live_units, reshards_after_forward

CallKind = Literal["all_gather", "reduction", "last_reduction"]
"""The kind of a collective. "last_reduction": a reduction in the last micro-batch of an optimizer step."""


def step_schedule(plan: Plan) -> list[tuple[CallKind, str]]:
    """Return (kind, name of the group) of the collectives of one optimizer step, in the order of their calls.

    They do not depend on the number of ranks.
    """
    replay = Replay(plan)
    num_micro_batches = plan.policy.gradient_accumulation_steps
    for index in range(num_micro_batches):
        replay.micro_batch(plan.run, is_last=index + 1 == num_micro_batches)
    return replay.calls


@dataclass(slots=True)
class _Group:
    """The state that FSDP2 has of one group."""

    name: str
    kind: GroupKind
    is_trainable: bool
    reshards_after_forward: bool
    is_used_in_backward: bool = True
    """Whether the backward needs the unsharded parameters. False for an embedding that is a unit of its own."""
    is_unsharded: bool = False
    is_pending: bool = False
    """An all-gather was started and not waited for yet."""
    phase: Literal["idle", "pre_backward", "post_backward"] = "idle"
    positions: list[int] = field(default_factory=list)
    """Its indices in the record of forwards."""
    num_runs: int = 0
    """Its forwards in this micro-batch whose backward has not ended."""
    first_forward: int = 0
    """The number, among those of all groups, of the first of these forwards."""


class Replay:
    """A copy of FSDP2's state machine. Private methods are named after FSDP2's. See [Note: What is replayed].

    `micro_batch` replays the order of a `UnitRun`. For another order, call the four methods that begin and end a unit's
    forward and backward, then `end_micro_batch`. A subclass overrides what happens to a group (`all_gather_started` to
    `backward_ended`), which is called in FSDP2's order.
    """

    def __init__(self, plan: Plan) -> None:
        self.calls: list[tuple[CallKind, str]] = []
        """(kind, name of the group) of the collectives replayed so far."""
        self._stage = plan.policy.stage
        live = live_units(plan)
        self._groups: dict[str, list[_Group]] = {unit: [] for unit in ("", *plan.units)}
        """Unit -> its groups in the order in which they are unsharded: its own group, then those with group holders."""
        for group in plan.groups:
            self._groups[group.unit].append(
                _Group(
                    group.name,
                    group.kind,
                    group.is_trainable,
                    reshards_after_forward(group.kind, group.unit, plan, live),
                    is_used_in_backward=group.unit not in plan.own_units.lookups,
                )
            )
        named = {group.name: group for groups in self._groups.values() for group in groups}
        self._ending = [named[name] for name in plan.ending]
        size = plan.policy.prefetch_bucket_size if self._stage == 3 else 0
        self._forward_ahead = fits(plan.run.forward_order(), plan, size) if size else {}
        self._backward_ahead = fits(backward_order(plan), plan, size) if size else {}
        self._record: list[_Group] = []  # of forwards
        self._num_forwards = 0

    def all_gather_started(self, group: str) -> None:
        """An all-gather starts."""

    def all_gather_ended(self, group: str, *, in_forward: bool) -> None:
        """An all-gather ends: the unsharded parameters exist from now on."""

    def all_gather_discarded(self, group: str) -> None:
        """The result of an all-gather is released unused."""

    def resharded(self, group: str, *, in_forward: bool) -> None:
        """The unsharded parameters are released."""

    def backward_ended(self, group: str, *, reduces: bool) -> None:
        """The backward of a trainable group ends. Its gradients are reduced now, or retained unsharded."""

    def micro_batch(self, run: UnitRun, *, is_last: bool) -> None:
        """Replay one forward and its backward, with the flags that `TrainStep` sets."""
        self._forward(run)
        self._backward(run, is_last)
        self.end_micro_batch(is_last=is_last)

    def _forward(self, run: UnitRun) -> None:
        self.begin_forward(run.unit)
        for inner in run.inner:
            self._forward(inner)
        self.end_forward(run.unit)

    def _backward(self, run: UnitRun, is_last: bool) -> None:
        if run.output_requires_grad:
            self.begin_backward(run.unit)
        for inner in reversed(run.inner):
            self._backward(inner, is_last)
        if run.input_requires_grad:
            self.end_backward(run.unit, is_last=is_last)

    def begin_forward(self, unit: str) -> None:
        """Unshard a unit's groups, and start the all-gathers of the units that it prefetches."""
        for group in self._groups[unit]:
            self._num_forwards += 1
            if group.num_runs == 0:
                group.first_forward = self._num_forwards
            group.num_runs += 1
            self._unshard_and_wait(group, in_forward=True)
        for other in self._forward_ahead.get(unit, ()):
            for group in self._groups[other]:
                self._unshard(group)

    def end_forward(self, unit: str) -> None:
        """Reshard the unit's groups that the plan reshards after the forward."""
        for group in reversed(self._groups[unit]):
            if group.reshards_after_forward:
                self._reshard(group, in_forward=True)
            group.positions.append(len(self._record))
            self._record.append(group)

    def begin_backward(self, unit: str) -> None:
        """Unshard a unit's groups, and start the all-gathers of the units that it prefetches. Call for each output."""
        ahead = self._backward_ahead.get(unit, [])
        for group in reversed(self._groups[unit]):
            self._pre_backward(group, is_default=not ahead)
        for other in ahead:
            for group in reversed(self._groups[other]):
                self._unshard(group)

    def end_backward(self, unit: str, *, is_last: bool) -> None:
        """Reshard and reduce a unit's groups, as the stage requires."""
        for group in reversed(self._groups[unit]):
            self._post_backward(group, is_last)

    def end_micro_batch(self, *, is_last: bool) -> None:
        """End the backward of the root. See [Note: The rest of a backward] in `hooks/group_gradients.py`."""
        for group in sorted(self._ending, key=lambda group: group.first_forward, reverse=True):
            if group.phase != "post_backward":
                group.num_runs = 0
                self._post_backward(group, is_last)
        for group in self._ending:
            group.phase = "idle"
            group.num_runs = 0
            if is_last:
                if group.is_pending:
                    self.all_gather_discarded(group.name)
                group.is_pending = False
                group.positions.clear()
        if is_last:
            self._record.clear()

    def _unshard(self, group: _Group) -> None:
        if not (group.is_unsharded or group.is_pending):
            self.calls.append(("all_gather", group.name))
            group.is_pending = True
            self.all_gather_started(group.name)

    def _unshard_and_wait(self, group: _Group, *, in_forward: bool) -> None:
        self._unshard(group)
        if group.is_pending:
            self.all_gather_ended(group.name, in_forward=in_forward)
        group.is_unsharded, group.is_pending = True, False

    def _reshard(self, group: _Group, *, in_forward: bool) -> None:
        if group.is_unsharded:
            self.resharded(group.name, in_forward=in_forward)
        group.is_unsharded = False

    def _pre_backward(self, group: _Group, *, is_default: bool) -> None:
        if group.phase == "pre_backward":
            return
        group.phase = "pre_backward"
        if group.is_used_in_backward:
            self._unshard_and_wait(group, in_forward=False)
        if is_default and group.positions and (position := group.positions.pop()) > 0:
            before = self._record[position - 1]
            if before.is_used_in_backward:
                self._unshard(before)

    def _post_backward(self, group: _Group, is_last: bool) -> None:
        reduces = is_last or self._stage >= 2
        group.num_runs -= 1
        awaits_earlier_run = group.num_runs > 0 and group.is_trainable and reduces
        group.phase = "idle" if awaits_earlier_run else "post_backward"
        if is_last or (self._stage == 3 and group.kind != "model-wide"):
            self._reshard(group, in_forward=False)
        if group.is_trainable and not awaits_earlier_run:
            if reduces:
                self.calls.append(("last_reduction" if is_last else "reduction", group.name))
            self.backward_ended(group.name, reduces=reduces)
