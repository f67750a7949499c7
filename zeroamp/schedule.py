"""How often FSDP2 gathers and reduces each group in one optimizer step.

Pure: replays FSDP2's schedule on the names of a `Plan`, without tensors or ranks.

[Note: What is replayed]
A group that is resharded after its forward is gathered twice per micro-batch, any other once, and each reducing
backward reduces once: that is the rule, and `_Replay` has its exceptions. Each of them is FSDP2's own doing:

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from zeroamp.groups import GroupKind, GroupPlan
from zeroamp.plan import Plan
from zeroamp.prefetch import fits
from zeroamp.run_order import UnitRun

Kind = Literal["gather", "reduction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Calls per group name in one optimizer step, whatever the number of ranks."""

    gathers: Mapping[str, int]
    reductions: Mapping[str, int]
    order: Sequence[tuple[Kind, str]]
    """The same calls with their groups' names, in the order in which they are issued."""


def live_units(plan: Plan) -> set[str]:
    """Return the units that stay gathered from forward to backward: the last of the forward that fit together."""
    live: set[str] = set()
    numel = 0
    for unit in reversed(plan.run.forward_order()[1:]):  # the root, which is first, stays in any case
        numel += plan.numel_of(unit)
        if numel > plan.policy.max_live_parameters:
            break
        live.add(unit)
    return live


def reshards_after_forward(kind: GroupKind, unit: str, plan: Plan, live: set[str]) -> bool:
    """Whether a group is released between forward and backward; `live` are the units that are not.

    The root's groups stay: backward starts with them. So does the model-wide group: it is gathered once per step.
    """
    return plan.policy.stage == 3 and unit != "" and kind != "model-wide" and unit not in live


def step_schedule(plan: Plan) -> Schedule:
    """Return the calls of one optimizer step, all its micro-batches together."""
    replay = _Replay(plan)
    num_micro_batches = plan.policy.gradient_accumulation_steps
    for index in range(num_micro_batches):
        replay.micro_batch(plan.run, is_last=index + 1 == num_micro_batches)
    return replay.schedule()


def evaluation_schedule(plan: Plan) -> Schedule:
    """Return the calls of one forward without a backward, outside of a window."""
    replay = _Replay(plan)
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


class _Replay:
    """FSDP2's state machine. Each method is one of its own, see [Note: What is replayed]."""

    def __init__(self, plan: Plan) -> None:
        self._order: list[tuple[Kind, str]] = []
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
        for group in self._all():
            if group.phase != "post_backward":
                self._post_backward(group, is_last)
            group.phase = "idle"
            if is_last:
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

    def _unshard_and_wait(self, group: _Group) -> None:
        self._unshard(group)
        group.is_whole, group.is_pending = True, False

    def _forward(self, run: UnitRun) -> None:
        groups = self._groups[run.unit]
        for group in groups:
            self._unshard_and_wait(group)
        for unit in self._forward_ahead.get(run.unit, ()):
            for group in self._groups[unit]:
                self._unshard(group)
        for inner in run.inner:
            self._forward(inner)
        for group in reversed(groups):
            if group.reshards_after_forward:
                group.is_whole = False
            group.positions.append(len(self._record))
            self._record.append(group)

    def _backward(self, run: UnitRun, is_last: bool) -> None:
        groups = self._groups[run.unit]
        if run.output_requires_grad:
            ahead = self._backward_ahead.get(run.unit, [])
            for group in reversed(groups):
                self._pre_backward(group, is_default=not ahead)
            for unit in ahead:
                for group in reversed(self._groups[unit]):
                    self._unshard(group)
        for inner in reversed(run.inner):
            self._backward(inner, is_last)
        if run.input_requires_grad:
            for group in reversed(groups):
                self._post_backward(group, is_last)

    def _pre_backward(self, group: _Group, *, is_default: bool) -> None:
        if group.phase == "pre_backward":
            return
        group.phase = "pre_backward"
        self._unshard_and_wait(group)
        if is_default and group.positions and (position := group.positions.pop()) > 0:
            self._unshard(self._record[position - 1])

    def _post_backward(self, group: _Group, is_last: bool) -> None:
        group.phase = "post_backward"
        if is_last or (self._stage == 3 and group.kind != "model-wide"):
            group.is_whole = False
        if group.is_trainable and (is_last or self._stage >= 2):
            self._order.append(("reduction", group.name))


def _start(group: GroupPlan, reshards: bool) -> _Group:
    is_trainable = any(param.dtypes.wire is not None for param in group.params)
    return _Group(group.name, group.kind, is_trainable, reshards)
