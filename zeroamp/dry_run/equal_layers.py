"""Traces a model of many equal layers by running a few of them.

[Note: Equal layers]
If the children of a module list are all units and alike, only the first `NUM_RUN` (4) are run. The events of the third
of them, forward and backward, are repeated for the layers that are not run, and the events of the fourth become those
of the last layer. This is exact if the layers behave alike, which is checked: if the events of the second layer differ
from those of the third, all layers are run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroamp.dry_run.events import Event, GradientReady, Mark, Point
from zeroamp.dry_run.inputs import Arguments
from zeroamp.dry_run.traced_micro_batch import MicroBatch, trace_micro_batch
from zeroamp.planning.plan import Plan
from zeroamp.training.loss import LossFunction

NUM_RUN = 4


@dataclass(frozen=True, slots=True)
class Repeat:
    """A module list whose children are equal units."""

    fqn: str
    names: tuple[str, ...]
    """Names of its children, in order."""

    def unit(self, index: int) -> str:
        """Return the FQN of a child."""
        return f"{self.fqn}.{self.names[index]}"


def trace_few_layers(
    model: nn.Module,
    plan: Plan,
    arguments: Arguments,
    *,
    device_type: str,
    checkpointing: bool,
    loss_fn: LossFunction | None = None,
) -> MicroBatch:
    """Return the same as `trace_micro_batch`, but run only a few of many equal layers. See [Note: Equal layers]."""

    def run(repeats: Sequence[Repeat]) -> MicroBatch:
        children = {repeat.fqn: repeat.names[:NUM_RUN] for repeat in repeats}
        options: dict[str, Any] = {"checkpointing": checkpointing, "loss_fn": loss_fn, "children": children}
        return trace_micro_batch(model, plan, arguments, device_type=device_type, **options)

    repeats = list(find_repeats(model, plan))
    try:
        traced = run(repeats)
    except (IndexError, KeyError):  # the forward indexes its layers
        if not repeats:
            raise
        return run([])
    events: Sequence[Event] | None = traced.events
    for repeat in repeats:
        events = None if events is None else repeated(events, repeat)
    return run([]) if events is None else replace(traced, events=events)


def find_repeats(model: nn.Module, plan: Plan) -> Iterator[Repeat]:
    """Yield the lists of more than `NUM_RUN` equal units. Of nested lists, yield the outer ones."""
    units, found = set(plan.units), list[str]()
    gather = {alias: param.dtypes for param in plan.params for alias in (param.fqn, *param.aliases)}
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) <= NUM_RUN:
            continue
        if any(fqn.startswith(f"{other}.") for other in found):
            continue
        repeat = Repeat(fqn, tuple(name for name, _ in module.named_children()))
        children = list(module)
        if len(children) != len(repeat.names):  # a layer that is there twice
            continue
        if not all(repeat.unit(index) in units for index in range(len(children))):
            continue
        described = [_description(child, repeat.unit(index), gather) for index, child in enumerate(children)]
        if all(_alike(described[0], other, index) for index, other in enumerate(described)):
            found.append(fqn)
            yield repeat


def repeated(events: Sequence[Event], repeat: Repeat) -> list[Event] | None:
    """Return the events of a run of all layers, or None if the layers that ran did not behave alike."""
    forward = _positions(events, repeat, "begin forward")
    backward = _positions(events, repeat, "begin backward")
    if forward != sorted(forward) or backward != sorted(backward, reverse=True) or forward[-1] > backward[-1]:
        return None
    last, count = NUM_RUN - 1, len(repeat.names)
    template = {
        "forward": (events[forward[1] : forward[2]], events[forward[2] : forward[3]]),
        "backward": (events[backward[1] : backward[0]], events[backward[2] : backward[1]]),
    }
    for of_first, of_second in template.values():
        if [_renamed(event, repeat, 1, 2) for event in of_first] != list(of_second):
            return None
    result = list(events[: forward[2]])
    for index in range(2, count - 1):
        result += [_renamed(event, repeat, 2, index) for event in template["forward"][1]]
    result += [_renamed(event, repeat, last, count - 1) for event in events[forward[3] : backward[2]]]
    for index in range(count - 2, 1, -1):
        result += [_renamed(event, repeat, 2, index) for event in template["backward"][1]]
    return [*result, *events[backward[1] :]]


def _positions(events: Sequence[Event], repeat: Repeat, point: Point) -> list[int]:
    """Return the index of each run layer's first mark of this point, or -1 if it has none."""
    first: dict[Event, int] = {}
    wanted = [Mark(point, repeat.unit(index)) for index in range(NUM_RUN)]
    for position, event in enumerate(events):
        if isinstance(event, Mark):
            first.setdefault(event, position)
    return [first.get(mark, -1) for mark in wanted]


def _renamed(event: Event, repeat: Repeat, before: int, after: int) -> Event:
    """Return the event with one layer's name replaced by another's."""
    old, new = repeat.unit(before), repeat.unit(after)

    def rename(name: str) -> str:
        return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name

    if isinstance(event, Mark):
        return replace(event, unit=rename(event.unit))
    if isinstance(event, GradientReady):
        return replace(event, param=rename(event.param))
    return replace(event, param=rename(event.param), unit=rename(event.unit))


def _description(module: nn.Module, fqn: str, dtypes: Mapping[str, Any]) -> list[Any]:
    """Return everything that a layer's trace can depend on: classes, shapes, dtypes and attributes, not values."""
    described: list[Any] = []
    for path, inner in module.named_modules():
        described += [path, type(inner)]
        for name, parameter in inner.named_parameters(recurse=False):
            full = ".".join(part for part in (fqn, path, name) if part)
            described += [name, tuple(parameter.shape), parameter.requires_grad, dtypes.get(full)]
        for name, value in vars(inner).items():
            if name not in ("_parameters", "_modules"):
                described += [name, _shape(value)]
    return described


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    return value


def _alike(first: Sequence[Any], other: Sequence[Any], index: int) -> bool:
    """Return whether two layers are equal, except for attributes that are the layer's index in the list."""
    if len(first) != len(other):
        return False
    for ours, theirs in zip(first, other, strict=True):
        is_number = type(ours) is type(theirs) is int and (ours, theirs) == (0, index)
        if not (is_number or ours is theirs or (type(ours) is type(theirs) and ours == theirs)):
            return False
    return True
