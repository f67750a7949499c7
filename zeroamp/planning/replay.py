"""How often, and when, FSDP2 gathers and reduces each group in one optimizer step.

Pure: replays FSDP2's schedule on the names of a `Plan`, without tensors or ranks.

[Note: What is replayed]
A group that is resharded after its forward is gathered twice per micro-batch, any other once, and each reducing
backward reduces once: that is the rule, and `Replay` has its exceptions. Each of them is FSDP2's own doing:

* The backward of a group starts the gather of the one that ended before it in the record of forwards. The record is
  kept until the last backward of a window, so the first unit of a later micro-batch starts a gather of the last group
  of the micro-batch before. That is the root's or the model-wide one, still whole, and costs nothing; in a model where
  neither exists it is the last unit: with accumulation one gather more per step, whose result nobody uses.
* A unit without a backward (frozen, and nothing trainable before it) is gathered ahead in vain all the same. Inside a
  window the next forward uses that copy; at its end the copy is dropped.
* A unit that runs several times in one forward is gathered and reduced for each run: with zeros but for its first,
  since autograd adds the gradients of all runs before it hands them out. (Up to torch 2.12, which reduces no zeros,
  once. Those versions are not replayed.)
* `prefetch_bucket_size` gathers ahead by the order of registration.

So the numbers hold for modules that run in the order of `run_order`. A model that runs them otherwise may gather a unit
once more or less, and one that skips a unit saves its gathers (not its reductions: unused parameters are reduced as
zeros, from torch 2.13 on).
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from zeroamp.planning.groups import GroupKind, GroupPlan
from zeroamp.planning.plan import Plan
from zeroamp.planning.run_order import UnitRun
from zeroamp.planning.schedule import Kind, Schedule, fits, live_units, reshards_after_forward


class GroupListener(Protocol):
    """Is told what a replay does with each group, in the order in which FSDP2 does it."""

    def gather_started(self, group: str) -> None:
        """The all-gather was started."""

    def gather_ended(self, group: str, *, in_forward: bool) -> None:
        """It was waited for: the unsharded parameters are there."""

    def gather_dropped(self, group: str) -> None:
        """It was started, and nobody needed it."""

    def released(self, group: str, *, in_forward: bool) -> None:
        """The unsharded parameters are gone."""

    def backward_ended(self, group: str, *, reduces: bool) -> None:
        """All gradients of a trainable group are there; they are reduced now or kept."""


class _Deaf:
    """Listens to nothing."""

    def gather_started(self, group: str) -> None:
        pass

    def gather_ended(self, group: str, *, in_forward: bool) -> None:
        pass

    def gather_dropped(self, group: str) -> None:
        pass

    def released(self, group: str, *, in_forward: bool) -> None:
        pass

    def backward_ended(self, group: str, *, reduces: bool) -> None:
        pass


DEAF: GroupListener = _Deaf()
"""Listens to nothing."""


def step_schedule(plan: Plan) -> Schedule:
    """Return the calls of one optimizer step, all its micro-batches together."""
    replay = Replay(plan)
    num_micro_batches = plan.policy.gradient_accumulation_steps
    for index in range(num_micro_batches):
        replay.micro_batch(plan.run, is_last=index + 1 == num_micro_batches)
    return replay.schedule()


def evaluation_schedule(plan: Plan) -> Schedule:
    """Return the calls of one forward without a backward, outside of a window."""
    replay = Replay(plan)
    replay.evaluation(plan.run)
    return replay.schedule()


@dataclass(slots=True)
class _Group:
    """What FSDP2 knows of a group."""

    name: str
    kind: GroupKind
    is_trainable: bool
    reshards_after_forward: bool
    is_whole: bool = False
    is_pending: bool = False
    """A gather was started and nobody waited for it yet."""
    phase: Literal["idle", "pre_backward", "post_backward"] = "idle"
    positions: list[int] = field(default_factory=list)
    """Where it is in the record of forwards."""


class Replay:
    """FSDP2's state machine. Each private method is one of its own, see [Note: What is replayed].

    `micro_batch` drives it by a `UnitRun`; the four methods that begin and end a unit's forward and backward, and
    `end_micro_batch`, are for what has an order of its own.
    """

    def __init__(self, plan: Plan, listener: GroupListener = DEAF) -> None:
        self._order: list[tuple[Kind, str]] = []
        self._listener = listener
        self._stage = plan.policy.stage
        live = live_units(plan)
        self._groups: dict[str, list[_Group]] = {unit: [] for unit in ("", *plan.units)}
        """Unit -> its groups in the order in which they are gathered: its own, then those with holders."""
        for group in plan.groups:
            self._groups[group.unit].append(_start(group, reshards_after_forward(group.kind, group.unit, plan, live)))
        size = plan.policy.prefetch_bucket_size if self._stage == 3 else 0
        explicit = size > 0
        self._forward_ahead = fits(plan.run.forward_order(), plan, size) if explicit else {}
        self._backward_ahead = fits(plan.run.backward_order(), plan, size) if explicit else {}
        self._record: list[_Group] = []  # of forwards

    def schedule(self) -> Schedule:
        """Return what was run so far."""
        counts = {kind: Counter(name for found, name in self._order if found == kind) for kind in get_args(Kind)}
        return Schedule(gathers=counts["gather"], reductions=counts["reduction"], order=self._order)

    def evaluation(self, run: UnitRun) -> None:
        """Run one forward."""
        self._forward(run)

    def micro_batch(self, run: UnitRun, *, is_last: bool) -> None:
        """Run one forward and its backward with the flags that `TrainStep` sets."""
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
        """Gather a unit's groups, and start what it fetches ahead."""
        for group in self._groups[unit]:
            self._unshard_and_wait(group, in_forward=True)
        for other in self._forward_ahead.get(unit, ()):
            for group in self._groups[other]:
                self._unshard(group)

    def end_forward(self, unit: str) -> None:
        """Release a unit's groups where they are resharded after the forward."""
        for group in reversed(self._groups[unit]):
            if group.reshards_after_forward:
                self._reshard(group, in_forward=True)
            group.positions.append(len(self._record))
            self._record.append(group)

    def begin_backward(self, unit: str) -> None:
        """Gather a unit's groups, and start what it fetches ahead. Called for each output, as FSDP2's hook is."""
        ahead = self._backward_ahead.get(unit, [])
        for group in reversed(self._groups[unit]):
            self._pre_backward(group, is_default=not ahead)
        for other in ahead:
            for group in reversed(self._groups[other]):
                self._unshard(group)

    def end_backward(self, unit: str, *, is_last: bool) -> None:
        """Release and reduce a unit's groups, as the stage has it."""
        for group in reversed(self._groups[unit]):
            self._post_backward(group, is_last)

    def end_micro_batch(self, *, is_last: bool) -> None:
        """End the backward of the root."""
        for group in self._all():
            if group.phase != "post_backward":
                self._post_backward(group, is_last)
            group.phase = "idle"
            if is_last:
                if group.is_pending:
                    self._listener.gather_dropped(group.name)
                group.is_pending = False
                group.positions.clear()
        if is_last:
            self._record.clear()

    def _all(self) -> list[_Group]:
        return [group for groups in self._groups.values() for group in groups]

    def _unshard(self, group: _Group) -> None:
        if not (group.is_whole or group.is_pending):
            self._order.append(("gather", group.name))
            group.is_pending = True
            self._listener.gather_started(group.name)

    def _unshard_and_wait(self, group: _Group, *, in_forward: bool) -> None:
        self._unshard(group)
        if group.is_pending:
            self._listener.gather_ended(group.name, in_forward=in_forward)
        group.is_whole, group.is_pending = True, False

    def _reshard(self, group: _Group, *, in_forward: bool) -> None:
        if group.is_whole:
            self._listener.released(group.name, in_forward=in_forward)
        group.is_whole = False

    def _pre_backward(self, group: _Group, *, is_default: bool) -> None:
        if group.phase == "pre_backward":
            return
        group.phase = "pre_backward"
        self._unshard_and_wait(group, in_forward=False)
        if is_default and group.positions and (position := group.positions.pop()) > 0:
            self._unshard(self._record[position - 1])

    def _post_backward(self, group: _Group, is_last: bool) -> None:
        group.phase = "post_backward"
        if is_last or (self._stage == 3 and group.kind != "model-wide"):
            self._reshard(group, in_forward=False)
        if group.is_trainable:
            reduces = is_last or self._stage >= 2
            if reduces:
                self._order.append(("reduction", group.name))
            self._listener.backward_ended(group.name, reduces=reduces)


def _start(group: GroupPlan, reshards: bool) -> _Group:
    is_trainable = any(param.dtypes.wire is not None for param in group.params)
    return _Group(group.name, group.kind, is_trainable, reshards)
